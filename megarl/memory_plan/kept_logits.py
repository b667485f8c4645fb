"""Choice of `trainer.keep_logits`: whether an update keeps a row's logits, or computes them again."""

from __future__ import annotations

from megarl.config import Recipe
from megarl.memory_plan.devices import GPU, MARGIN_GIB, GpuMemory
from megarl.memory_plan.models import Models
from megarl.memory_plan.phases import memory_table
from megarl.memory_plan.remedies import with_field_values

FIELD = "trainer.keep_logits"


def can_keep_logits(recipe: Recipe, models: Models, gpus: GpuMemory) -> bool:
    """Return whether updates that keep the logits are predicted to leave `MARGIN_GIB` of each GPU."""
    phases = memory_table(with_field_values(recipe, {FIELD: True}), models, GPU, gpu_gib=gpus.engine).phases
    updates = [phase for phase in phases if phase.metric == "train"]
    return all(phase.device_bytes <= (gpus.gib_for(phase) - MARGIN_GIB) * 2**30 for phase in updates)
