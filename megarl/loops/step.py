"""A step in progress: its number, samples, metrics, and the outcome of its updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megarl.tracking.metrics import values
from megarl.tracking.outcomes import StepOutcome, Update
from megarl.types import Group


@dataclass(frozen=True, slots=True)
class StepSamples:
    """Samples and settings that a step starts from, before the trainer's log-probs.

    `groups` are trained in this step, `waiting` groups in later ones. A synchronous step computes the log-probs of both
    in one batch, because rounding depends on the batch. Asynchronous steps have no waiting groups here.
    `role_baselines` are the reward baselines of self-play's roles.
    """

    groups: Sequence[Group]
    waiting: Sequence[Group]
    kl_coefficient: float
    role_baselines: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Step:
    """A step in progress. Decisions use `outcome`; `metrics` are only written."""

    number: int
    metrics: dict[str, float] = field(default_factory=dict)
    outcome: StepOutcome = field(default_factory=StepOutcome)

    def log(self, metrics: Mapping[str, float]) -> None:
        self.metrics |= metrics

    def log_update(self, update: Update) -> None:
        self.outcome.add("policy", [update.outcome])
        self.log(values(update.metrics))
