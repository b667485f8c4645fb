"""Model calls to segments, on ids typed in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megarl.rollout.stitch import ModelCall, stitch
from megarl.types import Completion, ExpertsHandle

END = 9


def call(prompt: list[int], sampled: list[int], logprobs: list[float], version: int = 4, **more: Any) -> ModelCall:
    token_ids = np.array(sampled, np.int64)
    completion = Completion("r", token_ids, np.array(logprobs, np.float32), "stop", version, **more)
    return ModelCall(np.array(prompt, np.int32), completion)


def test_a_call_that_extends_the_one_before_is_one_segment_with_it() -> None:
    first = call([1, 2, 3], [10, 11, END], [-0.1, -0.2, -0.3])
    second = call([1, 2, 3, 10, 11, END, 20, 21], [12, END], [-0.4, -0.5], version=5)
    segment = stitch([first, second])
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


def test_the_experts_are_those_of_the_last_call() -> None:
    first = call([1, 2, 3], [10, 11], [-0.1, -0.2], routed_experts=ExpertsHandle(0, 5))
    second = call([1, 2, 3, 10, 11, 20], [12], [-0.4], routed_experts=ExpertsHandle(1, 9))
    assert stitch([first, second]).routed_experts == ExpertsHandle(1, 9)


@pytest.mark.parametrize(
    "prompt", [pytest.param([1, 2, 3, 10, 8, END, 20], id="another token"), pytest.param([1, 2, 3, 10], id="shorter")]
)
def test_a_prompt_that_rewrites_what_was_is_refused(prompt: list[int]) -> None:
    first = call([1, 2, 3], [10, 11, END], [-0.1, -0.2, -0.3])
    with pytest.raises(ValueError, match="model call"):
        stitch([first, call(prompt, [12], [-0.4])])
    with pytest.raises(ValueError, match="needs a model call"):
        stitch([])
