"""Layouts of LoRA adapters. An adapter is split over ranks, pipeline stages and model chunks like its linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megarl.families.lora_rules import adapter_rules
from megarl.families.model_tensors import list_tensors
from megarl.families.tensors.names import TensorName
from megarl.families.tensors.rules import Rule
from megarl.reshard.layouts.megatron import MegatronLayouts


@dataclass(frozen=True)
class AdapterLayouts(MegatronLayouts):
    """Layouts of the adapters on all trainer ranks. `rank` is the LoRA rank."""

    targets: tuple[str, ...] = ()
    rank: int = 0

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        return adapter_rules(self.model, self.targets, self.rank)

    @cached_property
    def tensors(self) -> Sequence[TensorName]:
        return list_tensors(self.rules, self.model)


def adapter_layouts(base: MegatronLayouts, targets: tuple[str, ...], rank: int) -> AdapterLayouts:
    """Return the layouts of the LoRA adapters of modules `targets`. `base`: layouts of the model's own weights."""
    return AdapterLayouts(
        base.model, base.parallel, base.padded_vocab_size, base.transformer_engine, targets=targets, rank=rank
    )
