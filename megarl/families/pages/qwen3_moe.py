"""Qwen3-MoE: Qwen3 with a router and experts in the feed-forward layers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from megarl.families.config_json import windows
from megarl.families.family import Family
from megarl.families.pages import qwen2, qwen3
from megarl.families.reading import DEFAULT_EXPERTS, read_experts
from megarl.families.tensors.rules import Rule, with_experts

if TYPE_CHECKING:
    from megarl.families.shape import ModelShape


def rules(model: ModelShape) -> tuple[Rule, ...]:
    """Return the rules that map checkpoint tensors to Megatron parameters: Qwen3's, with experts."""
    return with_experts(qwen3.rules(model), model)


FAMILY = Family(
    "Qwen3MoeForCausalLM",
    partial(read_experts, qk_norm=True, windows=windows.switched_on),
    rules,
    {**qwen2.FIELDS, **DEFAULT_EXPERTS, "num_key_value_heads": 4},
    is_quantisable=True,
    has_adapter_slots=True,
)
