"""The settings of the trainer in each step of the run that `run_items.py` measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """Settings of the trainer for a step: trainer.offload and trainer.recompute."""

    offload: tuple[str, ...]
    recompute: str

    @property
    def name(self) -> str:
        """Name of the settings in the lines of metrics."""
        return f"{'offloaded' if self.offload else 'resident'}_recompute_{self.recompute}"


PLAN = tuple(
    settings
    for settings in (
        Settings(("optimizer", "gradients"), "full"),
        Settings((), "full"),
        Settings((), "none"),
    )
    for _ in range(2)
)
"""Settings of each step, two steps with the same."""


def clean_steps(plan: Sequence[Settings]) -> list[int]:
    """Return the numbers, from 1, of the steps that are neither a warm-up nor mixed.

    The first step warms up. A step after a change of the offload begins with states that the step before moved away.
    """
    return [number for number in range(2, len(plan) + 1) if plan[number - 1].offload == plan[number - 2].offload]
