"""Detection of spikes: updates with a gradient norm or loss far above the recent median (train.on_spike)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from megarl.rounding import divide_up
from megarl.tracking.outcomes import UpdateOutcome


class UpdateLimits(NamedTuple):
    """Gradient norm and loss above which the next update is dropped. None: no limit."""

    grad_norm: float | None = None
    loss: float | None = None


class Spike(NamedTuple):
    """An update above its limits. `loss` is in nats. None: losses are not compared."""

    grad_norm: float
    loss: float | None
    limits: UpdateLimits

    def __str__(self) -> str:
        measures = [("gradient norm", self.grad_norm, self.limits.grad_norm), ("loss", self.loss, self.limits.loss)]
        exceeded_limits = [
            f"{name} {value:.4g} (limit {limit:.4g})"
            for name, value, limit in measures
            if value is not None and limit is not None and value > limit
        ]
        return " and ".join(exceeded_limits)


def is_memory(saved: Any) -> bool:
    """Return whether a value has the form of `SpikeDetector.as_json`."""
    if not isinstance(saved, dict) or type(saved.get("rollbacks")) is not int or saved["rollbacks"] < 0:
        return False
    numbers = [saved.get("norms"), saved.get("losses")]
    return all(
        isinstance(values, list) and all(type(value) in (int, float) and 0 < value < math.inf for value in values)
        for values in numbers
    )


class SpikeDetector:
    """Computes the next update's limits: the median of the last `window` updates, times a factor.

    Dropped updates count in the median too, so a lasting change of level is accepted after half a window. There are no
    limits before half a window of updates. Updates without a gradient, and losses of zero or below, do not count.
    `loss_factor` None: losses are not compared.
    """

    def __init__(self, *, factor: float, loss_factor: float | None, window: int) -> None:
        self._factor, self._loss_factor = factor, loss_factor
        self._min_updates = divide_up(window, by=2)
        self._norms: deque[float] = deque(maxlen=window)
        self._losses: deque[float] = deque(maxlen=window)
        self.rollbacks = 0
        """Number of rollbacks since the run began."""
        self.spikes: list[Spike] = []
        """Spikes of the current step's updates."""

    def limits(self) -> UpdateLimits:
        # No limit before `_min_updates`: a median of fewer values says little.
        grad_norm = loss = None
        if len(self._norms) >= self._min_updates:
            grad_norm = self._factor * median(self._norms)
        if self._loss_factor is not None and len(self._losses) >= self._min_updates:
            loss = self._loss_factor * median(self._losses)
        return UpdateLimits(grad_norm, loss)

    def add(self, outcome: UpdateOutcome) -> None:
        loss = None if outcome.loss is None else outcome.loss.number
        self.observe(outcome.grad_norm, loss, is_spike=outcome.is_spike)

    def observe(self, grad_norm: float, loss: float | None, *, is_spike: bool) -> None:
        """Add an update. `is_spike`: the ranks dropped it."""
        compared_loss = loss if self._loss_factor is not None else None
        if is_spike:
            self.spikes.append(Spike(grad_norm, compared_loss, self.limits()))
        if math.isfinite(grad_norm) and grad_norm > 0:
            self._norms.append(grad_norm)
        if compared_loss is not None and math.isfinite(compared_loss) and compared_loss > 0:
            self._losses.append(compared_loss)

    def begin_step(self) -> None:
        self.spikes = []

    def as_json(self) -> dict[str, Any]:
        return {"norms": list(self._norms), "losses": list(self._losses), "rollbacks": self.rollbacks}

    def restore(self, saved: Mapping[str, Any]) -> None:
        norms: Sequence[float] = saved["norms"]
        losses: Sequence[float] = saved["losses"]
        self._norms.extend(norms)
        self._losses.extend(losses)
        self.rollbacks = saved["rollbacks"]
