"""Records of samples for people to read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megarl.data.token_batch import TokenBatch
from megarl.rollout.state import flatten
from megarl.rollout.step.rl_batch import RLBatch
from megarl.types import Group, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

MOST_TOKENS = 512
"""Maximum number of recorded tokens per sample. Longer samples are cut in the middle."""
_BYTES_OF_CHARACTER = 4
"""Maximum bytes of a UTF-8 character, and so the maximum number of tokens sharing a character."""


def with_rendered_prompts(
    records: Sequence[Mapping[str, Any]], trajectories: Sequence[Trajectory], tokenizer: Tokenizer
) -> Iterator[dict[str, Any]]:
    """Yield the trajectories' records with `rendered_prompt`: the text of the first prompt's tokens.

    It includes everything added by the chat template. A trajectory without sampled tokens has none.
    """
    text_by_prompt: dict[bytes, str] = {}  # Attempts at one problem share their prompt: decode it once.
    for record, trajectory in zip(records, trajectories, strict=True):
        prompt = trajectory.first_prompt
        if prompt is None:
            yield dict(record)
            continue
        key = prompt.tobytes()
        if key not in text_by_prompt:
            # Keep control tokens: they show a wrong chat template.
            text_by_prompt[key] = str(tokenizer.decode(prompt.tolist(), skip_special_tokens=False))
        yield {**record, "rendered_prompt": text_by_prompt[key]}


async def token_records(
    groups: Sequence[Group],
    batch: RLBatch,
    tokenizer: Tokenizer,
    forward: Callable[[TokenBatch], Awaitable[NDArray[np.float32]]],
    *,
    count: int,
    weight_version: int,
    has_engine_logprobs: bool = False,
) -> list[dict[str, Any]]:
    """Return token-by-token records of `count` trajectories: half with the highest advantages, half with the lowest.

    `batch` is built from `groups` and has advantages. A record has the fields of `Trajectory.record`, except the
    completion. Its `columns` have one entry per token of the last segment, from the first sampled token on; null for
    tokens not sampled. Log-probs are in nats. `logprob_gap`, trainer minus engine, is null for tokens sampled before
    `weight_version`, the trainer's current weights. `cut` is the number of tokens omitted in the middle.

    `forward` computes the trainer's log-probs, float32 [tokens], if the batch lacks them. `has_engine_logprobs`: the
    batch's old log-probs are the engine's. Call this function before the update.
    """
    trajectories = flatten(groups)
    samples = _find_extreme_samples(batch, count)
    if not len(samples):
        return []
    selected_batch = batch.select(batch.last_segments[samples])
    old_logprobs = selected_batch.per_token.get("old_logprobs")
    # NaN marks log-probs to be computed only by the update's own forward pass.
    is_known = not (old_logprobs is None or has_engine_logprobs or np.isnan(old_logprobs).any())
    if old_logprobs is None or not is_known:
        old_logprobs = await forward(selected_batch)
    logprobs_by_segment = np.split(old_logprobs, selected_batch.cu_seqlens[1:-1])
    advantages_by_segment = np.split(selected_batch.per_token["advantages"], selected_batch.cu_seqlens[1:-1])
    records = []
    for sample, trainer_logprobs, token_advantages in zip(
        samples.tolist(), logprobs_by_segment, advantages_by_segment, strict=True
    ):
        trajectory = trajectories[sample]
        # Log-probs computed here are by the current weights, so compare them only with tokens sampled by these weights.
        is_comparable = is_known | (trajectory.segments[-1].weight_versions == weight_version)
        records.append(_make_token_record(trajectory, trainer_logprobs, token_advantages, is_comparable, tokenizer))
    return records


def _make_token_record(
    trajectory: Trajectory,
    trainer_logprobs: NDArray[np.float32],
    token_advantages: NDArray[np.float32],
    is_comparable: NDArray[np.bool_],
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """Return a trajectory's record with `columns` of its last segment. Arrays: [tokens of this segment].

    `is_comparable` marks the tokens sampled by the weights of `trainer_logprobs`.
    """
    segment = trajectory.segments[-1]
    is_sampled = segment.weight_versions >= 0
    first_sampled = int(is_sampled.argmax())
    shown_tokens = np.arange(first_sampled, len(segment))
    num_omitted = max(0, len(shown_tokens) - MOST_TOKENS)
    if num_omitted:
        shown_tokens = np.concatenate([shown_tokens[: MOST_TOKENS // 2], shown_tokens[-(MOST_TOKENS // 2) :]])
    logprob_gaps = trainer_logprobs - segment.rollout_logprobs
    columns = {
        "text": selected_texts(tokenizer, segment.token_ids[first_sampled:], shown_tokens - first_sampled),
        "advantage": _round_known(token_advantages, is_sampled, shown_tokens),
        "rollout_logprob": _round_known(segment.rollout_logprobs, is_sampled, shown_tokens),
        "trainer_logprob": _round_known(trainer_logprobs, is_sampled & is_comparable, shown_tokens),
        "logprob_gap": _round_known(logprob_gaps, is_sampled & is_comparable, shown_tokens),
        "weight_version": _round_known(segment.weight_versions, is_sampled, shown_tokens),
        "turn": _round_known(segment.turns, is_sampled, shown_tokens),
    }
    # `columns` already contain the completion's text.
    record = {name: value for name, value in trajectory.record().items() if name not in ("completion", "turns")}
    return {**record, "segments": len(trajectory.segments), "cut": num_omitted, "columns": columns}


def token_texts(tokenizer: Tokenizer, token_ids: NDArray[np.int64]) -> list[str]:
    """Return the text of each token [tokens]. If several tokens share a character, the last one has its text."""
    texts: list[str] = []
    pending_tokens: list[int] = []
    for num_read, token in enumerate(token_ids.tolist(), 1):
        pending_tokens.append(token)
        text = str(tokenizer.decode(pending_tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        # The decoder writes U+FFFD for an incomplete character. A token may also mean U+FFFD, so join at most 4 tokens.
        is_part = text.endswith("\ufffd") and len(pending_tokens) < _BYTES_OF_CHARACTER and num_read < len(token_ids)
        if not is_part:
            # SentencePiece decoders drop the space before a text's first word, so restore it.
            raw_token = tokenizer.convert_ids_to_tokens(pending_tokens[0])
            needs_space = isinstance(raw_token, str) and raw_token.startswith("\u2581") and not text.startswith(" ")
            pending_tokens = []
            text = f" {text}" if needs_space else text
        texts.append("" if is_part else text)
    return texts


def selected_texts(tokenizer: Tokenizer, token_ids: NDArray[np.int64], selected: NDArray[np.int64]) -> list[str]:
    """Return the texts of the tokens at the indices `selected` [selected].

    Decodes only these tokens, and neighbours sharing a character. A segment of 32k tokens would take seconds.
    """
    texts: list[str] = []
    # Decode each run of consecutive indices, from `run_start` up to `run_end`.
    for indices in np.split(selected, 1 + (np.diff(selected) > 1).nonzero()[0]):
        run_start, run_end = int(indices[0]), int(indices[-1]) + 1
        # A character has at most `_BYTES_OF_CHARACTER` tokens, so it begins and ends within this distance.
        earliest_start = max(0, run_start - _BYTES_OF_CHARACTER + 1)
        first_decoded = next(
            (
                start
                for start in range(run_start, earliest_start - 1, -1)
                if _begins_character(tokenizer, token_ids[start:])
            ),
            run_start,
        )
        decoded_texts = token_texts(tokenizer, token_ids[first_decoded : run_end + _BYTES_OF_CHARACTER - 1])
        texts += decoded_texts[run_start - first_decoded : run_end - first_decoded]
    return texts


def _begins_character(tokenizer: Tokenizer, token_ids: NDArray[np.int64]) -> bool:
    """Return whether the text of these tokens begins with a whole character."""
    first_tokens = token_ids[:_BYTES_OF_CHARACTER].tolist()
    text = str(tokenizer.decode(first_tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    return not text.startswith("\ufffd")


def _find_extreme_samples(batch: RLBatch, count: int) -> NDArray[np.int64]:
    """Return the indices of `count` samples: half with the highest mean advantages, half with the lowest."""
    sums = np.add.reduceat(np.where(batch.loss_mask, batch.per_token["advantages"], 0.0), batch.cu_samples[:-1])
    # Mean per token, because a sum would prefer long trajectories.
    means = sums / np.maximum(batch.num_sampled, 1)
    order = np.argsort(-means, kind="stable")
    order = order[batch.num_sampled[order] > 0]
    count = min(count, len(order))
    return np.concatenate([order[: count - count // 2], order[len(order) - count // 2 :]])


def _round_known(
    values: NDArray[Any], is_known: NDArray[np.bool_], selected: NDArray[np.int64]
) -> list[float | int | None]:
    """Return the values of the selected tokens, to six digits; None where a value is unknown or not finite."""
    is_shown = is_known & np.isfinite(values)
    return [
        (value if isinstance(value, int) else float(f"{value:.6g}")) if is_finite else None
        for value, is_finite in zip(values[selected].tolist(), is_shown[selected].tolist(), strict=True)
    ]
