"""Comparison at the start of SFT and preference learning: the trainer's log-probs against those of transformers.

Runs that sample compare trainer and engine in every step (metrics `logprob_gap/`). SFT and preference learning have no
engine, or use it only in evaluations, so a wrongly computed model would train unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.data.token_batch import TokenBatch
from megarl.loops.started_run import Run
from megarl.types import TrainingSequence

_NUM_TOKENS, _LONGEST = 256, 128
"""Number of tokens to compare, and maximum tokens of one sequence."""
_LIMITS = {"float32": 1e-3}
_ROUNDED_LIMIT, _FP8_LIMIT = 0.05, 0.2
"""Largest mean distance in nats explained by rounding: of dtypes not in `_LIMITS`, and with trainer.fp8."""


class Gap(NamedTuple):
    """Distance of log-probs in nats over the compared tokens."""

    mean: float
    largest: float
    num_tokens: int


async def compare_start(run: Run, examples: Iterable[Sequence[TrainingSequence]]) -> None:
    """Compare log-probs of the first examples, and print their distance, before the first step of a new run.

    Warns if the distance exceeds rounding, or transformers cannot compute the model. An example is one or two
    sequences.
    """
    recipe = run.recipe
    # A reward model's value head has no counterpart. After a resume the weights differ from those in the folder.
    if recipe.loop == "reward_model" or run.folder.resumed_step or not recipe.train.steps:
        return
    batch = TokenBatch.from_sequences(first_sequences(examples))
    tokens = np.split(batch.token_ids, batch.cu_seqlens[1:-1])
    policy = run.models["policy"]
    with run.tracker.phase("start"), policy.work.uncounted():
        reference_logprobs, *_ = await policy.group.call("transformers_model.logprobs", tokens)
        if isinstance(reference_logprobs, str):
            run.tracker.notice(
                f"model.path: log-probs are not compared with transformers at the start: {reference_logprobs}."
            )
            return
        trainer_logprobs = await policy.forward(batch)
    gap = measure_gap(np.split(trainer_logprobs, batch.cu_seqlens[1:-1]), reference_logprobs)
    limit = _FP8_LIMIT if recipe.trainer.fp8 != "none" else _LIMITS.get(recipe.model.dtype, _ROUNDED_LIMIT)
    if (text := gap_warning(gap, limit)) is not None:
        run.tracker.notice(text)
    else:
        run.tracker.info(f"trainer against transformers: {_describe_gap(gap)}")


def first_sequences(examples: Iterable[Sequence[TrainingSequence]]) -> list[TrainingSequence]:
    """Return the first examples' sequences, cut to `_LONGEST` tokens, until they have `_NUM_TOKENS` tokens."""
    beginnings: list[TrainingSequence] = []
    for sequences in examples:
        beginnings += [
            TrainingSequence(sequence.token_ids[:_LONGEST], sequence.loss_mask[:_LONGEST]) for sequence in sequences
        ]
        if sum(len(sequence.token_ids) for sequence in beginnings) >= _NUM_TOKENS:
            break
    return beginnings


def measure_gap(trained: Sequence[NDArray[np.float32]], references: Sequence[NDArray[np.float32]]) -> Gap:
    """Return the distance of the trainer's and the reference's log-probs, without each sequence's first token.

    Both have an array [tokens] per sequence.
    """
    distances = np.abs(
        np.concatenate(
            [
                trainer_logprobs[1:] - reference_logprobs[1:]
                for trainer_logprobs, reference_logprobs in zip(trained, references, strict=True)
            ]
        )
    )
    return Gap(float(distances.mean()), float(distances.max()), len(distances))


def gap_warning(gap: Gap, limit: float) -> str | None:
    """Return the warning for a mean distance above `limit` nats, or None."""
    # Not `gap.mean > limit`: this is False for NaN, and NaN must warn.
    if gap.mean <= limit:
        return None
    return (
        f"model.path: the trainer computes other log-probs than transformers' own model: {_describe_gap(gap)}; "
        f"rounding explains a mean of {limit:g}. The run would train another model than the folder's. Check "
        "config.json and trainer.megatron."
    )


def _describe_gap(gap: Gap) -> str:
    return f"log-probs of {gap.num_tokens} tokens differ by {gap.mean:.2g} nats on average, at most {gap.largest:.2g}"
