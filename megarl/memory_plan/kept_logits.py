"""Choice of `trainer.keep_logits`: whether an update keeps a row's logits, or computes them again."""

from __future__ import annotations

from collections.abc import Collection

from megarl.config import Recipe
from megarl.config.effects import unmet
from megarl.memory_plan.devices import GPU, MARGIN_GIB, GpuMemory
from megarl.memory_plan.models import Models
from megarl.memory_plan.phases import memory_table
from megarl.memory_plan.remedies import with_field_values

FIELD = "trainer.keep_logits"


def can_keep_logits(recipe: Recipe, models: Models, gpus: GpuMemory, *, stages: Collection[int] | None = None) -> bool:
    """Return whether updates can keep the logits, and are predicted to leave `MARGIN_GIB` of each GPU with them.

    `stages`: examine these pipeline stages only; None: all.
    """
    if unmet(recipe, FIELD) is not None:
        return False
    with_logits = with_field_values(recipe, {FIELD: True})
    table = memory_table(with_logits, models, GPU, gpu_gib=gpus.engine, stages=stages)
    updates = [phase for phase in table.phases if phase.metric == "train"]
    return all(phase.device_bytes <= (gpus.gib_for(phase) - MARGIN_GIB) * 2**30 for phase in updates)
