"""Samples token by token: which are chosen, what their columns hold, how they are bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tokenizers import Tokenizer as Raw
from tokenizers.decoders import ByteLevel, Metaspace
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from megarl.config import Recipe
from megarl.data.token_batch import TokenBatch
from megarl.loops.sample_writer import SampleWriter
from megarl.rollout.step.rl_batch import RLBatch
from megarl.rollout.step.sample_records import MOST_TOKENS, selected_texts, token_records, token_texts
from megarl.rollout.step.scoring import score_tokens
from megarl.types import Problem, Reward, Segment, Trajectory


def tokenizer(words: list[str], decoder: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of these words, with the decoder of a family."""
    raw = Raw(WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    raw.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def attempt(number: int, sampled: str, *, version: int = 3) -> Trajectory:
    """Tokens 0, 1, ... of which those marked x are sampled, with log-probs -0.5, -1.5, ..."""
    mask = np.array([mark == "x" for mark in sampled])
    places = np.arange(len(sampled))
    segment = Segment(
        places.astype(np.int64),
        mask,
        np.where(mask, -places - 0.5, 0).astype(np.float32),
        np.where(mask, version, -1).astype(np.int32),
        np.where(mask, 0, -1).astype(np.int16),
    )
    problem = Problem(number, ({"role": "user", "content": "q"},), (0,), "7")
    return Trajectory("single_turn", problem, 0, number, (segment,), Reward(float(number), True, True))


def records(
    trajectories: list[Trajectory], advantages: list[float], count: int, *, rollout: bool = False, **changes: Any
) -> list[dict[str, Any]]:
    batch = RLBatch.from_groups([trajectories])
    lengths = [len(t.segments[0]) for t in trajectories]
    spread = np.repeat(advantages, lengths).astype(np.float32)
    batch.per_token["advantages"] = np.where(batch.loss_mask, spread, 0).astype(np.float32)
    batch.per_token |= {name: np.full(len(spread), value, np.float32) for name, value in changes.items()}
    asked: list[int] = []

    async def forward(chosen: TokenBatch) -> np.ndarray:
        asked.append(chosen.num_sequences)
        return (chosen.token_ids * -1.0 - 0.75).astype(np.float32)

    words = tokenizer([f"w{number}" for number in range(2000)], None)
    settings = {"count": count, "weight_version": 3, "has_engine_logprobs": rollout}
    found = asyncio.run(token_records([trajectories], batch, words, forward, **settings))
    num_sampled = sum(bool(t.num_sampled) for t in trajectories)
    is_known = not rollout and not np.isnan(changes.get("old_logprobs", np.nan))
    assert asked == ([] if is_known else [min(count, num_sampled)])
    return found


def test_the_columns_of_the_highest_and_the_lowest_advantages() -> None:
    trajectories = [attempt(0, "..xx"), attempt(1, ".xx.x"), attempt(2, ".x", version=2), attempt(3, ".xxx")]
    best, worst = records(trajectories, [0.5, 2.0, -3.0, 1.0], 2)
    assert (best["reward"], worst["reward"]) == (1.0, 2.0)
    assert "completion" not in best and best["answer"] == "7" and best["cut"] == 0
    assert best["columns"] == {
        "text": ["w1", "w2", "w3", "w4"],
        "advantage": [2, 2, None, 2],
        "rollout_logprob": [-1.5, -2.5, None, -4.5],
        "trainer_logprob": [-1.75, -2.75, None, -4.75],
        "logprob_gap": [-0.25, -0.25, None, -0.25],
        "weight_version": [3, 3, None, 3],
        "turn": [0, 0, None, 0],
    }
    # The trainer's weights are not those that sampled it.
    assert worst["columns"]["trainer_logprob"] == [None] and worst["columns"]["weight_version"] == [2]


def test_known_log_probs_are_not_computed_again() -> None:
    [found] = records([attempt(0, ".xx")], [1.0], 1, old_logprobs=-7.0)
    assert found["columns"]["trainer_logprob"] == [-7, -7]
    # The step's first update is to give them.
    [unknown] = records([attempt(0, ".xx")], [1.0], 1, old_logprobs=np.nan)
    assert unknown["columns"]["trainer_logprob"] == [-1.75, -2.75]


def test_a_ratio_that_starts_from_the_engine_is_scored_and_shown_with_the_trainers_log_probs() -> None:
    trajectories = [attempt(0, ".xx")]
    recipe = Recipe.model_validate(
        {"name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"},
         "algorithm": {"old_logprobs": "rollout"}}
    )  # fmt: skip
    batch = RLBatch.from_groups([trajectories])
    asyncio.run(score_tokens(batch, {}, recipe, weight_version=3))
    batch.per_token["advantages"] = np.ones(3, np.float32)
    assert batch.per_token["old_logprobs"].tolist() == [0, -1.5, -2.5]

    async def forward(chosen: TokenBatch) -> np.ndarray:
        return (chosen.token_ids * -1.0 - 0.75).astype(np.float32)

    shown = writer_of(recipe, forward).token_records(3, [trajectories], batch)
    [found] = asyncio.run(shown)
    assert found["columns"]["rollout_logprob"] == [-1.5, -2.5]
    assert found["columns"]["trainer_logprob"] == [-1.75, -2.75]
    assert found["columns"]["logprob_gap"] == [-0.25, -0.25]


def writer_of(recipe: Recipe, forward: Callable[[TokenBatch], Awaitable[np.ndarray]]) -> SampleWriter:
    """A writer of one sample's tokens at each step."""
    parts: dict[str, Any] = {
        "recipe": recipe.model_copy(update={"samples_every_steps": 1, "samples_with_tokens": 1}),
        "tracker": SimpleNamespace(phase=lambda name: nullcontext()),
        "tokenizer": tokenizer([f"w{number}" for number in range(9)], None),
        "policy": SimpleNamespace(forward=forward),
    }
    return SampleWriter(**parts)


def test_the_engines_log_probs_are_not_taken_for_the_trainers() -> None:
    [found] = records([attempt(0, ".xx")], [1.0], 1, rollout=True, old_logprobs=-7.0)
    assert found["columns"]["trainer_logprob"] == [-1.75, -2.75]


def test_long_samples_are_cut_in_the_middle() -> None:
    [found] = records([attempt(0, "." + "x" * (MOST_TOKENS + 100))], [1.0], 1)
    texts = found["columns"]["text"]
    assert found["cut"] == 100 and len(texts) == MOST_TOKENS
    assert (texts[0], texts[MOST_TOKENS // 2 - 1], texts[-1]) == ("w1", f"w{MOST_TOKENS // 2}", f"w{MOST_TOKENS + 100}")


@pytest.mark.parametrize("count", [1, 3, 9])
def test_no_sample_is_recorded_twice(count: int) -> None:
    trajectories = [attempt(number, ".xx") for number in range(4)]
    found = records([*trajectories, replace(attempt(9, "..."))], [0.0, 0.0, 1.0, -1.0, 5.0], count)
    assert len({record["reward"] for record in found}) == len(found) == min(count, 4)


def test_a_character_of_several_tokens_is_the_text_of_the_last() -> None:
    # The bytes of "é" as byte-level vocabularies write them.
    found = token_texts(tokenizer(["a", "Ã", "©", "Ġb"], ByteLevel()), np.array([0, 1, 2, 3, 1]))
    assert found == ["a", "", "é", " b", "\ufffd"]


@pytest.mark.parametrize("extra", range(4))
def test_characters_at_the_cut_are_whole(extra: int) -> None:
    # The four bytes of an emoji as byte-level vocabularies write them, again and again; the cut may be within.
    emoji = tokenizer(["ð", "Ł", "ĺ", "Ģ", "a"], ByteLevel())
    token_ids = np.array([4] * extra + [0, 1, 2, 3] * MOST_TOKENS)
    whole = token_texts(emoji, token_ids)
    assert whole[extra : extra + 4] == ["", "", "", "\U0001f600"]
    half = MOST_TOKENS // 2
    for ends in (half, half - 1):
        kept = np.concatenate([np.arange(ends), np.arange(len(token_ids) - ends, len(token_ids))])
        assert selected_texts(emoji, token_ids, kept) == [whole[place] for place in kept.tolist()]


def test_of_a_long_sample_only_what_is_shown_is_decoded() -> None:
    words = tokenizer([f"w{number}" for number in range(2000)], None)
    decoded: list[int] = []

    class Counted:
        convert_ids_to_tokens = words.convert_ids_to_tokens

        def decode(self, token_ids: list[int], **settings: bool) -> str:
            decoded.append(len(token_ids))
            return str(words.decode(token_ids, **settings))

    kept = np.array([0, 1, 30_000, 30_001])
    found = selected_texts(cast(Any, Counted()), np.arange(32_000) % 2000, kept)
    assert found == ["w0", "w1", "w0", "w1"] and sum(decoded) < 40


def test_a_space_before_a_word_is_kept() -> None:
    found = token_texts(tokenizer(["\u2581a", "b", "\u2581c"], Metaspace()), np.array([0, 1, 2]))
    assert found == [" a", "b", " c"]
