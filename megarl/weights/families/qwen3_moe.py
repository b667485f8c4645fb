"""Qwen3-MoE: Qwen3 whose every feed-forward is a router and its experts."""

from __future__ import annotations

from megarl.model_shape import ModelShape
from megarl.weights.families import qwen3
from megarl.weights.families.rules import Rule, with_experts


def rules(model: ModelShape) -> tuple[Rule, ...]:
    """Megatron's parameters of a Qwen3-MoE."""
    return with_experts(qwen3.rules(model), model)
