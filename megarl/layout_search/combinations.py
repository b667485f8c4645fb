"""All combinations of a placement's trainers, engines and offloads, with a lower bound of each one's seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.layout_search.candidates import EngineSizes, Placement, TrainerSizes
from megarl.memory_plan.activations import PassSettings
from megarl.memory_plan.savings import Recomputation
from megarl.preflight import sizes
from megarl.step_cost.trainer import Parts


class Row(NamedTuple):
    """A trainer's sizes with recomputation and row length."""

    trainer: TrainerSizes
    recomputation: Recomputation
    row_tokens: int


@dataclass(kw_only=True)
class Combinations:
    """All combinations of one placement, as arrays over `rows`, engines and offloads."""

    placement: Placement
    placed: Recipe
    rows: list[Row]
    engines: list[EngineSizes]
    offloads: list[tuple[str, ...]]
    update: Parts
    """Seconds of a step's updates that keep their logits, by cause, each [rows]."""
    update_without_logits: Parts
    """The same if updates compute their logits again."""
    logprobs: NDArray[np.float64]
    offload: NDArray[np.float64]
    """Seconds of offloading [rows, offloads]."""
    reshard: NDArray[np.float64]
    """Seconds of a reshard, a lower bound [engines]."""
    bound: NDArray[np.float64]
    """Seconds of a step, a lower bound [rows, engines, offloads]."""
    states: NDArray[np.float64]
    """Bytes of weights, gradients and optimizer on a rank, a lower bound [rows]."""
    settings: PassSettings
    refused: Counter[str]
    overfull: set[int] = field(default_factory=set)
    """Rows whose update does not fit, whatever the engines."""
    examined: set[int] = field(default_factory=set)
    """Rows whose activations were predicted."""

    @cached_property
    def parallel(self) -> ParallelConfig:
        """Return the parallel sizes of the recipe itself on this placement."""
        return sizes.parallel_of(self.placed)

    @cached_property
    def rows_of(self) -> dict[TrainerSizes, list[int]]:
        """Return the numbers of the rows of each trainer."""
        numbers: dict[TrainerSizes, list[int]] = {}
        for number, row in enumerate(self.rows):
            numbers.setdefault(row.trainer, []).append(number)
        return numbers

    def at_least_as_full(self, full: Row) -> set[int]:
        """Return the numbers of the rows that take at least as much memory: longer ones, and without recomputation."""
        return {
            number
            for number in self.rows_of[full.trainer]
            if self.rows[number].row_tokens >= full.row_tokens
            and self.rows[number].recomputation in (full.recomputation, Recomputation("none"))
        }


def in_order(groups: Sequence[Combinations]) -> Iterator[tuple[Combinations, tuple[int, int, int]]]:
    """Yield all combinations of all groups by their bounds, smallest first."""
    bounds = [group.bound.ravel() for group in groups]
    if not bounds:
        return
    starts = np.cumsum([0, *map(len, bounds)])
    everything = np.concatenate(bounds)
    for place in np.argsort(everything, kind="stable"):
        number = int(np.searchsorted(starts, place, side="right")) - 1
        group = groups[number]
        row, engine, offload = np.unravel_index(int(place - starts[number]), group.bound.shape)
        yield group, (int(row), int(engine), int(offload))
