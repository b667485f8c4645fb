"""The score of one reward function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FunctionScore:
    """Score of one completion by one reward function.

    `format_valid` and `answer_correct` are None if the function does not judge them.
    """

    score: float
    format_valid: bool | None = None
    answer_correct: bool | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
