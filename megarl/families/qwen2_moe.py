"""Qwen2-MoE: Qwen2 with a router, experts and a gated shared expert in every feed-forward layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.families import qwen2, windows
from megarl.families.family import Family
from megarl.families.llama import DECODER, LAYER
from megarl.families.rules import Rule, gate_up, replicated, row, with_experts

if TYPE_CHECKING:
    from megarl.families.shape import ModelShape


def rules(model: ModelShape) -> tuple[Rule, ...]:
    """Return the rules of a Qwen2-MoE model. Without a shared expert there is no gate for it either."""
    routed = with_experts(qwen2.rules(model), model)
    hidden, shared = model.hidden_size, model.shared_intermediate_size
    if not shared:
        return routed
    here, there = DECODER + "mlp.shared_experts.", LAYER + "mlp.shared_expert"
    gate, up, down = (f"{there}.{kind}_proj.weight" for kind in ("gate", "up", "down"))
    return (
        *routed,
        # The shared expert's gate is a single row, replicated by Megatron-Core 0.16.1 on all ranks.
        replicated(here + "gate_weight", there + "_gate.weight", (1, hidden)),
        gate_up(here + "linear_fc1.weight", gate, up, (shared, hidden)),
        row(here + "linear_fc2.weight", down, (hidden, shared)),
    )


FAMILY = Family(
    "Qwen2MoeForCausalLM", rules, qkv_bias=True, has_experts=True, is_quantisable=True, windows=windows.refused
)
