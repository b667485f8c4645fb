"""Model calls to segments, on ids typed in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megarl.rollout.stitch import ModelCall, stitch
from megarl.types import Completion, ExpertsHandle, RetainedSets, Segment

END = 9


def call(prompt: list[int], sampled: list[int], logprobs: list[float], version: int = 4, **more: Any) -> ModelCall:
    token_ids, versions = np.array(sampled, np.int64), np.full(len(sampled), version, np.int32)
    completion = Completion("r", token_ids, np.array(logprobs, np.float32), "stop", versions, **more)
    return ModelCall(np.array(prompt, np.int32), completion)


def test_case_2_a_call_that_extends_the_one_before_is_one_segment_with_it() -> None:
    first = call([1, 2, 3], [10, 11, END], [-0.1, -0.2, -0.3])
    second = call([1, 2, 3, 10, 11, END, 20, 21], [12, END], [-0.4, -0.5], version=5)
    [segment] = stitch([first, second])
    assert segment.token_ids.tolist() == [1, 2, 3, 10, 11, END, 20, 21, 12, END]
    assert segment.loss_mask.tolist() == [c == "T" for c in "FFFTTTFFTT"]
    expected = [0, 0, 0, -0.1, -0.2, -0.3, 0, 0, -0.4, -0.5]
    assert segment.rollout_logprobs.tolist() == pytest.approx(expected)
    assert segment.weight_versions.tolist() == [-1, -1, -1, 4, 4, 4, -1, -1, 5, 5]
    assert segment.turns.tolist() == [-1, -1, -1, 0, 0, 0, -1, -1, 1, 1]
    kinds = {
        name: getattr(segment, name).dtype for name in ("token_ids", "rollout_logprobs", "weight_versions", "turns")
    }
    assert kinds == {
        "token_ids": np.dtype(np.int64),
        "rollout_logprobs": np.dtype(np.float32),
        "weight_versions": np.dtype(np.int32),
        "turns": np.dtype(np.int16),
    }


def test_the_experts_of_a_segment_are_those_of_its_last_call() -> None:
    first = call([1, 2, 3], [10, 11], [-0.1, -0.2], routed_experts=ExpertsHandle(0, 5))
    aside = call([7, 8], [9], [-0.3], routed_experts=ExpertsHandle(1, 7))
    second = call([1, 2, 3, 10, 11, 20], [12], [-0.4], routed_experts=ExpertsHandle(1, 9))
    assert [s.routed_experts for s in stitch([first, aside, second])] == [ExpertsHandle(1, 9), ExpertsHandle(1, 7)]


def marks(segment: Segment) -> str:
    return "".join("T" if is_trained else "F" for is_trained in segment.loss_mask)


def test_case_6_a_call_that_shares_only_the_beginning_opens_a_segment() -> None:
    """P1 -> C1; P1 C1 O1 -> C2; P3 -> C3, where P3 shares only P1."""
    calls = [
        call([1, 2, 3], [10, 11], [-0.1, -0.2]),
        call([1, 2, 3, 10, 11, 20], [12, 13], [-0.3, -0.4]),
        call([1, 2, 3, 11, 30], [14], [-0.5], version=5),
    ]
    first, second = stitch(calls)
    assert (first.token_ids.tolist(), marks(first)) == ([1, 2, 3, 10, 11, 20, 12, 13], "FFFTTFTT")
    assert (second.token_ids.tolist(), marks(second)) == ([1, 2, 3, 11, 30, 14], "FFFFFT")
    assert second.turns.tolist() == [-1] * 5 + [2] and second.weight_versions.tolist() == [-1] * 5 + [5]
    assert second.rollout_logprobs.tolist() == pytest.approx([0] * 5 + [-0.5])
    trained = int(first.loss_mask.sum() + second.loss_mask.sum())
    assert trained == sum(len(one.completion.token_ids) for one in calls) == 5


def test_case_7_of_two_calls_that_go_on_alike_the_first_trains_what_both_begin_with() -> None:
    calls = [
        call([1, 2], [10, 11], [-0.1, -0.2]),
        call([1, 2, 10, 11, 20], [12], [-0.3]),
        call([1, 2, 10, 11, 21], [13], [-0.4]),
        # And each goes on by itself.
        call([1, 2, 10, 11, 21, 13, 22], [14], [-0.5]),
        call([1, 2, 10, 11, 20, 12, 22], [15], [-0.6]),
    ]
    first, second = stitch(calls)
    assert (first.token_ids.tolist(), marks(first)) == ([1, 2, 10, 11, 20, 12, 22, 15], "FFTTFTFT")
    assert (second.token_ids.tolist(), marks(second)) == ([1, 2, 10, 11, 21, 13, 22, 14], "FFFFFTFT")
    assert not second.rollout_logprobs[:5].any() and (second.weight_versions[:5] == -1).all()


def test_a_call_extends_the_longest_of_the_segments_that_it_begins_with() -> None:
    calls = [
        call([1, 2], [10], [-0.1]),
        call([1, 2, 10, 20], [11], [-0.2]),
        call([1, 2], [10], [-0.3]),
        call([1, 2, 10, 20, 11, 21], [12], [-0.4]),
        call([1, 2, 10, 30], [13], [-0.5]),
    ]
    assert [np.unique(s.turns).tolist() for s in stitch(calls)] == [[-1, 0, 1, 3], [-1, 2, 4]]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_calls_each_sampled_token_is_trained_once(seed: int) -> None:
    """Few different tokens, so that prompts begin alike by chance; each call's tokens begin a segment."""
    random = np.random.default_rng(seed)
    calls: list[ModelCall] = []
    for number in range(30):
        held = calls[random.integers(len(calls))].token_ids if calls and random.random() < 0.8 else np.zeros(0, int)
        prompt = np.concatenate([held, random.integers(0, 2, random.integers(0 if len(held) else 1, 3))])
        size = random.integers(1, 4)
        calls.append(
            call(prompt.tolist(), random.integers(0, 2, size).tolist(), [-number - 1.0] * size, version=number)
        )
    segments = stitch(calls)
    for number, one in enumerate(calls):
        [(segment, places)] = [(s, np.flatnonzero(s.turns == number)) for s in segments if (s.turns == number).any()]
        start, end = len(one.prompt_token_ids), len(one.token_ids)
        assert places.tolist() == list(range(start, end))
        assert segment.token_ids[:end].tolist() == one.token_ids.tolist()
        assert (segment.rollout_logprobs[places] == -number - 1).all()
        # It went on from the longest segment that there was: all that its segment had trained before was then its end.
        before = [np.flatnonzero(s.loss_mask & (s.turns < number)) for s in segments]
        ends = [int(found[-1]) + 1 if len(found) else 0 for found in before]
        fitting = [
            length
            for s, length in zip(segments, ends, strict=True)
            if 0 < length <= start and np.array_equal(s.token_ids[:length], one.token_ids[:length])
        ]
        own = [length for s, length in zip(segments, ends, strict=True) if s is segment]
        assert own == [max(fitting, default=0)]
    assert sum(int(s.loss_mask.sum()) for s in segments) == sum(len(one.completion.token_ids) for one in calls)


def kept(*sets: list[int]) -> RetainedSets:
    counts = np.array([len(ids) for ids in sets], np.int32)
    return RetainedSets(counts, np.array([token for ids in sets for token in ids], np.int32))


def test_the_sets_that_tokens_were_sampled_from_stand_where_the_tokens_do() -> None:
    calls = [
        call([1, 2, 3], [10, 11], [-0.1, -0.2], retained_sets=kept([10, 12], [4, 11, 13])),
        call([1, 2, 3, 10, 11, 20], [12], [0.0]),
        call([1, 2, 3, 10, 8], [12, 6], [-0.1, -0.2], retained_sets=kept([5, 12], [6])),
        call([1, 2, 3, 10, 11, 20, 12, 21, 22], [7, 8], [0.0, -0.3], retained_sets=kept([7], [])),
    ]
    first, second = (segment.retained_sets for segment in stitch(calls))
    assert first is not None and second is not None
    assert first.counts.tolist() == [0, 0, 0, 2, 3, 0, 0, 0, 0, 1, 0]
    assert first.token_ids.tolist() == [10, 12, 4, 11, 13, 7]
    assert second.counts.tolist() == [0, 0, 0, 0, 0, 2, 1] and second.token_ids.tolist() == [5, 12, 6]
    assert first.counts.dtype == first.token_ids.dtype == np.int32
    assert [segment.retained_sets for segment in stitch(calls[1:2])] == [None]


@pytest.mark.parametrize(
    "prompt", [pytest.param([1, 2, 3, 10, 8, END, 20], id="another token"), pytest.param([1, 2, 3, 10], id="shorter")]
)
def test_a_prompt_that_rewrites_what_was_opens_a_segment(prompt: list[int]) -> None:
    first = call([1, 2, 3], [10, 11, END], [-0.1, -0.2, -0.3])
    segments = stitch([first, call(prompt, [12], [-0.4])])
    assert [marks(segment) for segment in segments] == ["FFFTTT", "F" * len(prompt) + "T"]
    with pytest.raises(ValueError, match="needs at least one"):
        stitch([])
