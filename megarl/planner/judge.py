"""Decides whether the predicted memory of a changed recipe fits its GPUs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megarl.config import Recipe
from megarl.planner.memory.devices import GPU, GpuMemory
from megarl.planner.memory.memory_table import MemoryTable, Phase
from megarl.planner.memory.models import Models
from megarl.planner.memory.phases import memory_table

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class PassBytes:
    """Bytes on the GPU in the fullest phase with gradients, and in the fullest without (0: no such phase)."""

    training: int
    scoring: int

    @property
    def largest(self) -> int:
        return max(self.training, self.scoring)


@dataclass(frozen=True, slots=True)
class MemoryJudge:
    """Predicts the memory of changed recipes and compares it with their GPUs.

    `models` must have the parallel sizes of the changed recipes.
    """

    models: Models
    gpus: GpuMemory
    stages: Collection[int] | None = None
    """Pipeline stages to examine; None: all."""

    def predict(self, recipe: Recipe) -> MemoryTable:
        return memory_table(recipe, self.models, GPU, gpu_gib=self.gpus.engine, stages=self.stages)

    def free_gib(self, phase: Phase) -> float:
        """Return the GiB that a phase leaves free on its GPU. Negative: the phase does not fit."""
        return self.gpus.gib_for(phase) - phase.device_bytes / _GIB

    def overfull_phases(self, table: MemoryTable, *, margin_gib: float = 0.0) -> list[Phase]:
        return [phase for phase in table.phases if phase.device_bytes > (self.gpus.gib_for(phase) - margin_gib) * _GIB]

    def accept(self, recipe: Recipe) -> MemoryTable | None:
        table = self.predict(recipe)
        return None if self.overfull_phases(table) else table

    def pass_bytes(self, recipe: Recipe) -> PassBytes:
        phases = self.predict(recipe).phases
        training = (phase.device_bytes for phase in phases if phase.metric == "train")
        scoring = (phase.device_bytes for phase in phases if phase.metric == "logprobs")
        return PassBytes(training=max(training), scoring=max(scoring, default=0))
