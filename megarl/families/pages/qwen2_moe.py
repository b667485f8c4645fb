"""Qwen2-MoE: Qwen2 with a router, experts and a gated shared expert in the feed-forward layers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from megarl.families.config_json import windows
from megarl.families.family import Family
from megarl.families.pages import qwen2
from megarl.families.reading import DEFAULT_EXPERTS, read_experts
from megarl.families.tensors.rules import Rule, with_experts, with_shared_expert

if TYPE_CHECKING:
    from megarl.families.shape import ModelShape


def rules(model: ModelShape) -> tuple[Rule, ...]:
    return with_shared_expert(with_experts(qwen2.rules(model), model), model, "shared_expert")


FAMILY = Family(
    "Qwen2MoeForCausalLM",
    partial(read_experts, qkv_bias=True, windows=windows.refuse_windows),
    rules,
    {**qwen2.FIELDS, **DEFAULT_EXPERTS, "num_key_value_heads": 16, "shared_expert_intermediate_size": 5632},
    is_quantisable=True,
)
