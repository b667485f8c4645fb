"""GLM-4.7-Flash: DeepSeek-V3's layers with GLM-4.5's router. The router is float32 in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megarl.families.config_json.config_values import quote, size
from megarl.families.family import Family, StoredNames
from megarl.families.mtp import NUMBERED
from megarl.families.pages import deepseek_v3, llama
from megarl.families.parts import Parts
from megarl.families.tensors import stacks
from megarl.types import DataError

if TYPE_CHECKING:
    from megarl.families.shape import ModelShape


def added_fields(config: Mapping[str, Any], stored_names: StoredNames) -> Mapping[str, Any]:
    """Return `first_k_dense_replace`, the number of dense first layers. transformers 5 writes `mlp_layer_types`
    instead.
    """
    if config.get("first_k_dense_replace") is not None:
        return {}
    # Without mlp_layer_types, transformers' class makes only the first layer dense.
    kinds = config.get("mlp_layer_types") or ["dense", "sparse"]
    is_known = isinstance(kinds, list) and "sparse" in kinds
    return {"first_k_dense_replace": kinds.index("sparse")} if is_known else {}


def read(config: Mapping[str, Any]) -> Parts:
    """Return the model's parts. Raises DataError if transformers and vLLM would take other layers as dense."""
    parts = deepseek_v3.read_latent(config)
    # `parts.kinds` is empty if all layers have experts.
    kinds = ["sparse" if kind.has_experts else "dense" for kind in parts.kinds]
    kinds = kinds or ["sparse"] * size(config, "num_hidden_layers")
    # transformers reads mlp_layer_types, and vLLM reads first_k_dense_replace: they must agree.
    if (stored_kinds := config.get("mlp_layer_types")) is not None and stored_kinds != kinds:
        raise DataError(f"mlp_layer_types is {quote(stored_kinds)}; first_k_dense_replace gives {quote(kinds)}.")
    return parts


def vllm_stacks(model: ModelShape) -> tuple[stacks.Stack, ...]:
    return (*deepseek_v3.vllm_stacks(model), stacks.float32(llama.LAYER + "mlp.gate.weight"))


_FIELDS = {
    **deepseek_v3.FIELDS,
    "max_position_embeddings": 202752,
    "n_group": 1,
    "num_key_value_heads": 20,
    # transformers' class has no such field.
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 768,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
}

FAMILY = Family(
    "Glm4MoeLiteForCausalLM", read, deepseek_v3.rules, _FIELDS, added_fields, stacks=vllm_stacks, draft_layers=NUMBERED
)
