"""Which results of a reward function count as rewards, and their sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from megarl.types import Reward

MAX_ABSOLUTE_SCORE = 1e6
"""Largest score: squares and sums of millions of such scores are exact enough in float32, those of 1e300 infinite."""


def checked(result: Any) -> Reward:
    """A function's result as a Reward of plain values. Raises TypeError or ValueError where it is none."""
    if not isinstance(result, Reward):
        raise TypeError(f"returned {result!r:.200}, not a megarl.types.Reward")
    if isinstance(result.score, bool) or not isinstance(result.score, Real):
        raise TypeError(f"returned a score that is not a number: {result!r:.200}")
    score = float(result.score)
    if not math.isfinite(score) or abs(score) > MAX_ABSOLUTE_SCORE:
        raise ValueError(f"returned a score outside -{MAX_ABSOLUTE_SCORE:g} to {MAX_ABSOLUTE_SCORE:g}: {result!r:.200}")
    for name in ("format_valid", "answer_correct"):
        if getattr(result, name) not in (True, False):
            raise TypeError(f"returned a Reward whose {name} is not True or False: {result!r:.200}")
    return Reward(score, bool(result.format_valid), bool(result.answer_correct))


def added(rewards: Sequence[Reward]) -> Reward:
    """The sum of the scores; format and answer are good if all say so. Raises ValueError for too large a sum."""
    return checked(
        Reward(
            score=sum(reward.score for reward in rewards),
            format_valid=all(reward.format_valid for reward in rewards),
            answer_correct=all(reward.answer_correct for reward in rewards),
        )
    )
