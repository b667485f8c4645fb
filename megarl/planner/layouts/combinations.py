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
from megarl.planner.seconds.trainer import CauseSeconds


class TrainerOption(NamedTuple):
    """A possible layout of the trainer: parallel sizes, recomputation, and the tokens that fit into one packed row."""

    trainer: TrainerSizes
    recomputation: Recomputation
    row_tokens: int


@dataclass(kw_only=True)
class Combinations:
    """Axes of the arrays: [trainer options], [engines], [offloads]."""

    placement: Placement
    placement_values: Mapping[str, Any]
    """Recipe fields of the placement."""
    placed: Recipe
    """The recipe with `placement_values`."""
    trainer_options: list[TrainerOption]
    engines: list[EngineSizes]
    offloads: list[tuple[str, ...]]
    update_seconds: CauseSeconds
    """Seconds of a step's updates by cause, each [trainer options], with stored logits."""
    update_seconds_without_logits: CauseSeconds
    """Like `update_seconds`, with logits recomputed in the backward pass."""
    scoring_seconds: NDArray[np.float64]
    """Seconds of a step's passes without gradients [trainer options]."""
    offload_seconds: NDArray[np.float64]
    """Seconds of offloading [trainer options, offloads]."""
    reshard_seconds: NDArray[np.float64]
    """Lower bound of the seconds of a reshard [engines]."""
    least_seconds: NDArray[np.float64]
    """Lower bound of a step's seconds [trainer options, engines, offloads]. Infinite: the combination cannot fit."""
    least_state_bytes: NDArray[np.float64]
    """Lower bound of a rank's bytes of weights, gradients and optimizer [trainer options]."""
    least_cache_gib: list[float]
    """GiB of the smallest KV cache for a longest sequence [engines]."""
    pass_settings: PassSettings
    """Settings of the recipe's passes. Each trainer option replaces the sizes that differ."""
    refused: Counter[str]
    """Counts of refused choices by reason, shared by all placements."""
    overfull: set[int] = field(default_factory=set)
    """Indices of trainer options whose update does not fit, with any engines."""
    examined: set[int] = field(default_factory=set)
    """Indices of trainer options whose activations have been predicted."""

    @cached_property
    def parallel(self) -> ParallelConfig:
        return sizes.parallel_of(self.placed)

    @cached_property
    def option_numbers_by_trainer(self) -> dict[TrainerSizes, list[int]]:
        option_numbers: dict[TrainerSizes, list[int]] = {}
        for option_number, option in enumerate(self.trainer_options):
            option_numbers.setdefault(option.trainer, []).append(option_number)
        return option_numbers

    def options_needing_as_much(self, reference: TrainerOption) -> set[int]:
        """Return the trainer options that need at least as much memory as the option `reference`.

        Their rows (packed micro-batches) are at least as long, and recompute the same modules or none.
        """
        return {
            option_number
            for option_number in self.option_numbers_by_trainer[reference.trainer]
            if self.trainer_options[option_number].row_tokens >= reference.row_tokens
            and self.trainer_options[option_number].recomputation in (reference.recomputation, Recomputation("none"))
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """One combination of trainer, engines and offloaded states, as a choice for `planner.search`."""

    group: Combinations
    option_number: int
    engine_number: int
    offload_number: int

    @property
    def index(self) -> tuple[int, int, int]:
        return self.option_number, self.engine_number, self.offload_number

    @property
    def option(self) -> TrainerOption:
        return self.group.trainer_options[self.option_number]

    @property
    def engine(self) -> EngineSizes:
        return self.group.engines[self.engine_number]

    @property
    def bound(self) -> float:
        return float(self.group.least_seconds[self.index])

    @property
    def key(self) -> tuple[TrainerSizes, EngineSizes, Placement]:
        """Identifies a layout. A search returns only the best choice of each key."""
        return self.option.trainer, self.engine, self.group.placement

    @property
    def values(self) -> dict[str, Any]:
        return {**self.group.placement_values, **self.layout_values}

    @property
    def layout_values(self) -> dict[str, Any]:
        """The recipe fields of this layout, with the smallest KV cache. A start chooses the fields set
        to None.
        """
        return {
            **self.option.trainer.values,
            **self.option.recomputation.values,
            "trainer.max_tokens_per_microbatch": self.option.row_tokens,
            "trainer.max_tokens_per_forward": None,
            "trainer.keep_logits": None,
            "trainer.offload": self.group.offloads[self.offload_number],
            "rollout.tp": self.engine.tp,
            "rollout.vllm": vllm_with(self.group.placed, self.engine.ep),
            "rollout.gpu_memory_utilization": None,
            "rollout.kv_cache_gib": self.group.least_cache_gib[self.engine_number],
        }


def iterate_by_bound(groups: Sequence[Combinations]) -> Iterator[LayoutChoice]:
    """Yield the combinations of all placements by ascending lower bound of their seconds, finite ones only."""
    bounds_of_groups = [group.least_seconds.ravel() for group in groups]
    if not bounds_of_groups:
        return
    group_starts = np.cumsum([0, *map(len, bounds_of_groups)])
    bounds = np.concatenate(bounds_of_groups)
    for position in np.argsort(bounds, kind="stable"):
        if not math.isfinite(bounds[position]):
            # Bounds ascend, so the remaining combinations cannot fit either.
            return
        group_number = int(np.searchsorted(group_starts, position, side="right")) - 1
        group = groups[group_number]
        position_in_group = int(position - group_starts[group_number])
        option_number, engine_number, offload_number = np.unravel_index(position_in_group, group.least_seconds.shape)
        yield LayoutChoice(
            group=group,
            option_number=int(option_number),
            engine_number=int(engine_number),
            offload_number=int(offload_number),
        )
