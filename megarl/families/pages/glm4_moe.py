"""GLM-4.5, 4.6, 4.7 and GLM-4.5-Air: Qwen3-MoE with a sigmoid router, dense first layers and a shared expert.

Layers for multi-token prediction are copied unchanged, or trained (`families.mtp`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megarl.families.config_json.config_values import flag, size
from megarl.families.config_json.rotary import read_rotary
from megarl.families.family import DEFAULTS, Family
from megarl.families.mtp import NUMBERED
from megarl.families.pages import llama, qwen2, qwen3
from megarl.families.parts import Parts
from megarl.families.reading import (
    DEFAULT_SIGMOID,
    grouped_query,
    kinds_with_first_dense,
    refuse_biases,
    sigmoid_router,
)
from megarl.families.tensors import stacks
from megarl.families.tensors.rules import Rule, router_bias_rule, with_experts, with_shared_expert
from megarl.types import DataError

if TYPE_CHECKING:
    from megarl.families.shape import ModelShape


def read(config: Mapping[str, Any]) -> Parts:
    """Return the parts of a GLM-4.5 model. Raises DataError for a tied output head."""
    refuse_biases(config, ignored=("attention_bias",))
    if flag(config, "tie_word_embeddings"):
        raise DataError("tie_word_embeddings true is not supported: vLLM 0.30 never ties this family's output head.")
    has_norm, has_bias = flag(config, "use_qk_norm"), flag(config, "attention_bias")
    return Parts(
        grouped_query(config, qkv_bias=has_bias, qk_norm=has_norm),
        # Half of the channels is the default of transformers and vLLM for this family.
        read_rotary(config, fraction=0.5),
        sigmoid_router(config),
        kinds_with_first_dense(config, size(config, "num_hidden_layers")),
        num_kept_layers=size(config, "num_nextn_predict_layers", null=0),
    )


def rules(model: ModelShape) -> tuple[Rule, ...]:
    """Return the rules that map checkpoint tensors to Megatron parameters.

    They are Qwen3's or Llama's, with biases and experts if the model has them.
    """
    attention = model.attention
    dense_rules = qwen3.rules(model) if attention.qk_norm else llama.rules(model)
    bias_rules = (qwen2.qkv_bias_rule(model),) if attention.qkv_bias else ()
    expert_rules = with_experts((*dense_rules, *bias_rules), model)
    return (*with_shared_expert(expert_rules, model, "shared_experts"), router_bias_rule(model))


def vllm_stacks(model: ModelShape) -> tuple[stacks.Stack, ...]:
    """Return vLLM's parameters as stacks of Hugging Face tensors.

    vLLM stores the router and its bias in float32, whatever the model's dtype.
    """
    gate = llama.LAYER + "mlp.gate."
    shared_expert_stacks = stacks.feed_forward(llama.LAYER + "mlp.shared_experts.")
    router_stacks = (stacks.float32(gate + "weight"), stacks.float32(gate + "e_score_correction_bias"))
    return (*stacks.standard(model), *shared_expert_stacks, *router_stacks)


_FIELDS = {
    **DEFAULTS,
    **DEFAULT_SIGMOID,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "use_qk_norm": False,
}

FAMILY = Family("Glm4MoeForCausalLM", read, rules, _FIELDS, stacks=vllm_stacks, draft_layers=NUMBERED)
