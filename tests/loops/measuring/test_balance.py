"""Which side of a separate placement is reported as the bottleneck, when, and what would balance them."""

from __future__ import annotations

import pytest

from megarl.loops.measuring.balance import FEWEST, WINDOW, Balance


def observed(balance: Balance, waited: float, engines_idle: float) -> dict[str, float]:
    """A step of ten seconds."""
    seconds = {"time/step_seconds": 10.0, "time/rollout_seconds": 10 * waited}
    return balance.observe_step(seconds, {"time/engines_idle": engines_idle})


def test_the_bottleneck_is_reported_once_known_and_again_when_it_changes() -> None:
    verdicts: list[str] = []
    balance = Balance(2, 2, verdicts.append)
    first = observed(balance, 1.0, 0.0)  # the first step's start is no one's fault
    assert first == {"time/rollout_waited_seconds": 10.0}
    for _ in range(FEWEST):
        assert not verdicts
        found = observed(balance, 0.5, 0.0)
    # Two trainers half idle do the work of one, two engines that of two.
    assert found["rollout/balanced_ranks"] == pytest.approx(4 * 2 / 3)
    [line] = verdicts
    assert line.startswith("the bottleneck is the engines: over 3 steps the trainer waited for samples 50% of the time")
    assert "Of 4 ranks about 2.7 for the engines would balance them (rollout.ranks, now 2)" in line
    for _ in range(2 * WINDOW):
        observed(balance, 0.5, 0.0)
    assert len(verdicts) == 1
    for _ in range(WINDOW):
        observed(balance, 0.0, 0.6)
    assert (
        len(verdicts) == 3
        and verdicts[1].startswith("neither side")
        and verdicts[2].startswith("the bottleneck is the trainer")
    )
    for _ in range(WINDOW):
        found = observed(balance, 0.05, 0.0)
    assert verdicts[3].startswith("neither side is the bottleneck") and found[
        "rollout/balanced_ranks"
    ] == pytest.approx(4 * 2 / 3.9)


def test_sides_that_take_turns_are_named_so() -> None:
    verdicts: list[str] = []
    balance = Balance(3, 1, verdicts.append, takes_turns=True)
    for _ in range(FEWEST + 1):
        found = observed(balance, 0.75, 0.25)
    # Three trainers work for a quarter of the time, one engine for three quarters of it.
    assert found["rollout/balanced_ranks"] == pytest.approx(2.0)
    assert len(verdicts) == 1 and "under rollout.max_staleness = 0 one waits while the other works" in verdicts[0]
