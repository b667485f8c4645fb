"""Conversations of several turns through the real engine: trained is what was sampled, and nothing else counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from megarl.rollout.stitch import ModelCall, stitch
from megarl.types import Completion, Problem, Trajectory
from tests.rank_pool import RankPool
from tools.checks import agents


def test_what_is_trained_of_conversations_is_what_was_sampled(
    tiny_model: Callable[..., Path], ranks: RankPool, tmp_path: Path
) -> None:
    found = agents.check(tiny_model(**agents.MODEL), 100, ranks, tmp_path)
    assert found["met"] and found["differing"] == found["changed"] == 0 and found["gap"] <= 1e-5, found
    assert found["trajectories"] == 100 and found["turns"] > 200 and found["truncated"] > 0
    assert found["segments"] > 120, "no history was rewritten"
    assert found["gradient_norm"] > 0


def test_a_difference_is_seen() -> None:
    completion = Completion("r", np.array([5, 6]), np.float32([-1, -2]), "stop", np.zeros(2, np.int32))
    call = ModelCall(np.array([1, 2, 3], np.int32), completion)
    [segment] = stitch([call])
    trajectory = Trajectory("test", Problem(0, (), (), ""), 0, 0, (segment,), None)

    def changed(**arrays: np.ndarray) -> Trajectory:
        return replace(trajectory, segments=(replace(segment, **arrays),))

    assert agents.differing(trajectory, [call]) == 0
    assert agents.differing(changed(token_ids=np.array([1, 2, 4, 5, 6])), [call]) == 1
    assert agents.differing(changed(loss_mask=np.array([False] * 4 + [True])), [call]) > 0
    assert agents.differing(replace(trajectory, segments=(segment, segment)), [call]) > 0
