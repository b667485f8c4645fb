"""Which results count as rewards."""

from __future__ import annotations

import pytest

from megarl.rewards.scores import added, checked
from megarl.types import Reward


def test_scores_are_added_and_all_must_agree() -> None:
    assert added([Reward(1.5, True, True), Reward(0.25, True, False)]) == Reward(1.75, True, False)
    assert added([Reward(2, 1, 1)]) == Reward(2.0, True, True)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), 1e300, -1.000001e6])
def test_a_score_that_float32_cannot_hold_sums_of_is_refused(score: float) -> None:
    with pytest.raises(ValueError, match="outside -1e\\+06 to 1e\\+06"):
        checked(Reward(score, True, True))


def test_a_sum_beyond_the_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        added([Reward(6e5, True, True), Reward(6e5, True, True)])


@pytest.mark.parametrize("result", [None, 1.0, [1.0], Reward("1", True, True), Reward(True, True, True)])  # type: ignore[arg-type]
def test_what_is_no_reward_is_refused(result: object) -> None:
    with pytest.raises(TypeError, match="returned"):
        checked(result)
