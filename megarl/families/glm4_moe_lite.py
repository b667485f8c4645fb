"""GLM-4.7-Flash: DeepSeek-V3's layers with GLM-4.5's router, in float32 in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megarl.families import deepseek_v3, llama, stacks
from megarl.families.config_values import shown
from megarl.families.family import Family
from megarl.families.mtp import NUMBERED
from megarl.families.parts import Parts
from megarl.types import DataError

if TYPE_CHECKING:
    from megarl.families.shape import ModelShape


def read(config: Mapping[str, Any]) -> Parts:
    """Return the parts of a GLM-4.7-Flash model."""
    parts = deepseek_v3.read_latent(config)
    kinds = ["sparse" if kind.has_experts else "dense" for kind in parts.kinds]
    # transformers reads this field and vLLM the other one: they must agree.
    if (given := config.get("mlp_layer_types")) is not None and given != kinds:
        raise DataError(f"mlp_layer_types is {shown(given)}; first_k_dense_replace gives {shown(kinds)}.")
    return parts


def live_stacks(model: ModelShape) -> tuple[stacks.Stack, ...]:
    """Return vLLM's parameters: the router is float32 there in models of any dtype."""
    return (*deepseek_v3.live_stacks(model), stacks.float32(llama.LAYER + "mlp.gate.weight"))


FAMILY = Family("Glm4MoeLiteForCausalLM", read, deepseek_v3.rules, stacks=live_stacks, mtp=NUMBERED)
