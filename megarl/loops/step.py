"""A step in progress: its number, its samples, its metrics, and the outcome of its updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megarl.tracking.metrics import values
from megarl.tracking.outcomes import StepOutcome, Update
from megarl.types import Group


@dataclass(frozen=True, slots=True)
class StepSamples:
    """Inputs of a step: its groups without the trainer's log-probs, the waiting groups, the KL coefficient, and each
    role's reward baseline before the step (self-play).

    `waiting` are groups left for later steps. A synchronous step computes the log-probs of `groups` and `waiting` in
    one batch, because the rounding depends on the batch. Asynchronous steps have no waiting groups here.
    """

    groups: Sequence[Group]
    waiting: Sequence[Group]
    kl_coefficient: float
    role_baselines: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Step:
    """Step in progress. Decisions are taken from `outcome`; `metrics` are written, and never decide."""

    number: int
    metrics: dict[str, float] = field(default_factory=dict)
    outcome: StepOutcome = field(default_factory=StepOutcome)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add metrics. They are written at the step's end."""
        self.metrics |= metrics

    def log_update(self, update: Update) -> None:
        """Record the policy's update. A step has one."""
        self.outcome.add("policy", [update.outcome])
        self.log(values(update.metrics))
