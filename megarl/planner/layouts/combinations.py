"""Combinations of trainers, engines and offloads under one placement, and their seconds as arrays."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.planner import sizes
from megarl.planner.layouts.candidates import EngineSizes, Placement, TrainerSizes, vllm_with
from megarl.planner.memory.activations import PassSettings
from megarl.planner.savings import Recomputation
from megarl.planner.seconds.trainer import Parts


class Row(NamedTuple):
    """A possible layout of the trainer: parallel sizes, recomputation, and the tokens that fit into one packed row."""

    trainer: TrainerSizes
    recomputation: Recomputation
    row_tokens: int


@dataclass(kw_only=True)
class Combinations:
    """Axes of the arrays: [rows], [engines], [offloads]. A row is a trainer's layout (`Row`)."""

    placement: Placement
    placement_values: Mapping[str, Any]
    """Recipe fields of the placement."""
    placed: Recipe
    """The recipe with `placement_values`."""
    rows: list[Row]
    engines: list[EngineSizes]
    offloads: list[tuple[str, ...]]
    update: Parts
    """Seconds of a step's updates by cause, each [rows], with stored logits."""
    update_without_logits: Parts
    """Like `update`, with logits recomputed in the backward pass."""
    logprobs: NDArray[np.float64]
    """Seconds of a step's passes without gradients [rows]."""
    offload: NDArray[np.float64]
    """Seconds of offloading [rows, offloads]."""
    reshard: NDArray[np.float64]
    """Lower bound of the seconds of a reshard [engines]."""
    bound: NDArray[np.float64]
    """Lower bound of a step's seconds [rows, engines, offloads]. Infinite: the combination cannot fit."""
    states: NDArray[np.float64]
    """Lower bound of a rank's bytes of weights, gradients and optimizer [rows]."""
    least_cache_gib: list[float]
    """GiB of the smallest KV cache for a longest sequence [engines]."""
    settings: PassSettings
    """Settings of the recipe's passes. Each row replaces the sizes that differ."""
    refused: Counter[str]
    """Counts of refused choices by reason, shared by all placements."""
    overfull: set[int] = field(default_factory=set)
    """Indices of rows whose update does not fit, with any engines."""
    examined: set[int] = field(default_factory=set)
    """Indices of rows whose activations have been predicted."""

    @cached_property
    def parallel(self) -> ParallelConfig:
        """The recipe's parallel sizes with this placement."""
        return sizes.parallel_of(self.placed)

    @cached_property
    def rows_by_trainer(self) -> dict[TrainerSizes, list[int]]:
        numbers: dict[TrainerSizes, list[int]] = {}
        for number, row in enumerate(self.rows):
            numbers.setdefault(row.trainer, []).append(number)
        return numbers

    def at_least_as_full(self, full: Row) -> set[int]:
        """Return the indices of rows that need at least as much memory as the row `full`.

        These rows are at least as long, and recompute the same modules or none.
        """
        return {
            number
            for number in self.rows_by_trainer[full.trainer]
            if self.rows[number].row_tokens >= full.row_tokens
            and self.rows[number].recomputation in (full.recomputation, Recomputation("none"))
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """One combination of trainer, engines and offloaded states, as a choice for `planner.search`."""

    group: Combinations
    row_number: int
    engine_number: int
    offload_number: int

    @property
    def index(self) -> tuple[int, int, int]:
        return self.row_number, self.engine_number, self.offload_number

    @property
    def row(self) -> Row:
        return self.group.rows[self.row_number]

    @property
    def engine(self) -> EngineSizes:
        return self.group.engines[self.engine_number]

    @property
    def bound(self) -> float:
        return float(self.group.bound[self.index])

    @property
    def key(self) -> tuple[TrainerSizes, EngineSizes, Placement]:
        """The sizes of trainer and engines, and the placement. A search returns the best choice of each key."""
        return self.row.trainer, self.engine, self.group.placement

    @property
    def values(self) -> dict[str, Any]:
        return {**self.group.placement_values, **self.layout_values}

    @property
    def layout_values(self) -> dict[str, Any]:
        """The recipe fields of this layout, with the smallest KV cache. A start chooses the fields set
        to None.
        """
        return {
            **self.row.trainer.values,
            **self.row.recomputation.values,
            "trainer.max_tokens_per_microbatch": self.row.row_tokens,
            "trainer.max_tokens_per_forward": None,
            "trainer.keep_logits": None,
            "trainer.offload": self.group.offloads[self.offload_number],
            "rollout.tp": self.engine.tp,
            "rollout.vllm": vllm_with(self.group.placed, self.engine.ep),
            "rollout.gpu_memory_utilization": None,
            "rollout.kv_cache_gib": self.group.least_cache_gib[self.engine_number],
        }


def iterate_by_bound(groups: Sequence[Combinations]) -> Iterator[LayoutChoice]:
    """Yield the combinations of all placements by ascending bound, without infinite bounds."""
    bounds = [group.bound.ravel() for group in groups]
    if not bounds:
        return
    starts = np.cumsum([0, *map(len, bounds)])
    everything = np.concatenate(bounds)
    for place in np.argsort(everything, kind="stable"):
        number = int(np.searchsorted(starts, place, side="right")) - 1
        group = groups[number]
        if not math.isfinite(everything[place]):
            # Bounds ascend, so the remaining combinations cannot fit either.
            return
        row, engine, offload = np.unravel_index(int(place - starts[number]), group.bound.shape)
        yield LayoutChoice(group=group, row_number=int(row), engine_number=int(engine), offload_number=int(offload))
