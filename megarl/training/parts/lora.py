"""LoRA adapters: only they are trained. The engine gets them merged into the weights, or as separate matrices."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cached_property

from megarl.families.lora_rules import LINEARS
from megarl.models import lora as lora_modules
from megarl.training.host.offload import ScaledAdapters
from megarl.training.model import ModelShard
from megarl.training.parts.engine_part import EnginePart


class LoraPart(EnginePart):
    """Adds adapters to a model and freezes its other weights. Dropout is on in updates only."""

    def __init__(self, shard: ModelShard) -> None:
        self._chunks = shard.chunks
        lora = shard.recipe.lora
        for chunk in shard.chunks:
            lora_modules.attach_adapters(
                chunk,
                [linear for name in lora.targets for linear in LINEARS[name]],
                rank=lora.rank,
                scale=lora.scale,
                dropout=lora.dropout,
                seed=shard.recipe.seed,
                is_exact=shard.parts.exact_blocks > 0,
            )

    def update_context(self) -> AbstractContextManager[None]:
        return lora_modules.switch_adapters(self._chunks, on=True, drops=True)

    def start_context(self) -> AbstractContextManager[None]:
        return lora_modules.switch_adapters(self._chunks, on=False, drops=False)

    @cached_property
    def scaled_adapters(self) -> ScaledAdapters:
        return ScaledAdapters(self._chunks)
