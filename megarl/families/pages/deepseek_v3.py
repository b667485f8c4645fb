"""DeepSeek-V3 and V3.1, Moonlight, Kimi-K2: latent attention, a sigmoid router, dense first layers, shared experts.

The layer for multi-token prediction is copied unchanged, or trained (`families.mtp`). Norms of latent vectors use
`rms_norm_eps`, like Megatron-Core and vLLM. transformers 5 uses 1e-6 for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megarl.families.config_json.config_values import COPY_AGAIN, flag, quote, size
from megarl.families.config_json.rotary import Rotary, read_rotary, rope_settings
from megarl.families.family import DEFAULTS, Family, StoredNames
from megarl.families.mtp import NUMBERED
from megarl.families.pages import llama
from megarl.families.parts import Latent, Parts
from megarl.families.reading import kinds_with_first_dense, refuse_biases, require_field, sigmoid_router
from megarl.families.tensors import stacks
from megarl.families.tensors.rules import (
    Rule,
    Variant,
    column,
    replicate,
    router_bias_rule,
    row,
    with_experts,
    with_shared_expert,
)
from megarl.types import DataError

if TYPE_CHECKING:
    from megarl.families.shape import ModelShape

_ROUTING = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""Fields of vLLM 0.30. If they are missing, vLLM routes without the bias, or by a softmax."""


def added_fields(config: Mapping[str, Any], stored_names: StoredNames) -> Mapping[str, Any]:
    """Return the missing fields of `_ROUTING`, if the folder has the router's bias."""
    missing_fields = {field: value for field, value in _ROUTING.items() if config.get(field) is None}
    has_bias = bool(missing_fields) and any(name.endswith(".gate.e_score_correction_bias") for name in stored_names())
    return missing_fields if has_bias else {}


def read(config: Mapping[str, Any]) -> Parts:
    """Return the model's parts. Raises DataError if fields that vLLM needs are missing."""
    for field, value in _ROUTING.items():
        if config.get(field) != value:
            raise DataError(
                f'{field} is {quote(config.get(field))}; vLLM needs "{value}" for this architecture. megarl adds a '
                "missing field only if the folder has the router's bias, e_score_correction_bias. Copy the field from "
                "the base model's config.json."
            )
    return read_latent(config)


def read_latent(config: Mapping[str, Any]) -> Parts:
    """Return the parts of a model with latent attention and sigmoid-routed experts."""
    refuse_biases(config)
    if flag(config, "tie_word_embeddings"):
        raise DataError("tie_word_embeddings true is not supported: vLLM 0.30 never ties this family's output head.")
    if config.get("rope_interleave", True) is not True:
        raise DataError("rope_interleave false is not supported: Megatron-Core and vLLM rotate neighbouring channels.")
    if config.get("moe_layer_freq", 1) != 1:
        raise DataError(f"moe_layer_freq {quote(config['moe_layer_freq'])} is not supported; only 1 is.")
    require_field(config, "first_k_dense_replace", "vLLM needs it: copy it from the base model's config.json.")
    return Parts(
        _read_attention(config),
        _read_rotary(config),
        sigmoid_router(config),
        kinds_with_first_dense(config, size(config, "num_hidden_layers")),
        num_kept_layers=size(config, "num_nextn_predict_layers", null=0),
    )


def _read_attention(config: Mapping[str, Any]) -> Latent:
    num_heads = size(config, "num_attention_heads")
    if (num_kv_heads := size(config, "num_key_value_heads", null=num_heads)) != num_heads:
        raise DataError(
            f"num_key_value_heads {num_kv_heads} differs from num_attention_heads {num_heads}. {COPY_AGAIN}"
        )
    return Latent(
        num_heads=num_heads,
        query_rank=size(config, "q_lora_rank", null=0),
        kv_rank=size(config, "kv_lora_rank"),
        plain_channels=size(config, "qk_nope_head_dim"),
        rotary_channels=size(config, "qk_rope_head_dim"),
        value_head_dim=size(config, "v_head_dim"),
    )


def _read_rotary(config: Mapping[str, Any]) -> Rotary:
    """Return unscaled or YaRN embeddings. Raises DataError for settings that vLLM 0.30 reads differently."""
    rope = rope_settings(config)
    rotary = read_rotary(config)
    if rotary.scaling not in ("default", "yarn") or rope.get("rope_type", rope.get("type")) == "dynamic":
        raise DataError(
            f"rope_type {quote(rope.get('rope_type', rope.get('type')))} is not supported, because vLLM 0.30 would "
            "compute YaRN instead for this family."
        )
    if ignored_settings := sorted(rope.keys() & {"attention_factor", "truncate"}):
        raise DataError(
            f"rope parameter {ignored_settings[0]} is not supported: vLLM 0.30 ignores it for latent attention."
        )
    if rotary.scaling == "yarn" and ("mscale" in rope) != ("mscale_all_dim" in rope):
        raise DataError(
            "rope parameters mscale and mscale_all_dim: vLLM 0.30 needs both or none for latent attention; add or "
            "remove one."
        )
    return replace(rotary, score_mscale=float(rope.get("mscale_all_dim", 0.0)))


def rules(model: ModelShape) -> tuple[Rule, ...]:
    """Return the rules that map checkpoint tensors to Megatron parameters.

    They are Llama's, with latent attention, routed experts and a shared expert.
    """
    llama_rules = (
        # Latent attention never fuses the norm before it.
        replace(rule, transformer_engine=None) if "input_layernorm" in rule.parameter else rule
        for rule in llama.rules(model)
        if "self_attention" not in rule.parameter
    )
    expert_rules = with_experts((*llama_rules, *_make_attention_rules(model)), model)
    return (*with_shared_expert(expert_rules, model, "shared_experts"), router_bias_rule(model))


def _make_attention_rules(model: ModelShape) -> tuple[Rule, ...]:
    """Return the rules of latent attention. Down projections are replicated, also in Transformer Engine's layers."""
    attention, hidden = model.attention, model.hidden_size
    assert isinstance(attention, Latent)
    megatron_prefix, checkpoint_prefix = llama.DECODER + "self_attention.", llama.LAYER + "self_attn."
    latent_channels, head_channels = attention.kv_rank, attention.plain_channels + attention.value_head_dim

    def norm_rule(kind: str, rank: int) -> Rule:
        rule = replicate(
            f"{megatron_prefix}{kind}_layernorm.weight", f"{checkpoint_prefix}{kind}_a_layernorm.weight", (rank,)
        )
        # Transformer Engine fuses the norm into the projection after it.
        return replace(rule, transformer_engine=Variant(f"{megatron_prefix}linear_{kind}_up_proj.layer_norm_weight"))

    low_rank_query_rules = (
        replicate(
            megatron_prefix + "linear_q_down_proj.weight",
            checkpoint_prefix + "q_a_proj.weight",
            (attention.query_rank, hidden),
        ),
        norm_rule("q", attention.query_rank),
        column(
            megatron_prefix + "linear_q_up_proj.weight",
            checkpoint_prefix + "q_b_proj.weight",
            (attention.score_channels, attention.query_rank),
        ),
    )
    direct_query_rule = (
        column(
            megatron_prefix + "linear_q_proj.weight",
            checkpoint_prefix + "q_proj.weight",
            (attention.score_channels, hidden),
        ),
    )
    kv_shape = (latent_channels + attention.rotary_channels, hidden)
    return (
        *(low_rank_query_rules if attention.query_rank else direct_query_rule),
        replicate(
            megatron_prefix + "linear_kv_down_proj.weight", checkpoint_prefix + "kv_a_proj_with_mqa.weight", kv_shape
        ),
        norm_rule("kv", latent_channels),
        # Megatron and the checkpoint have the same row order: head by head, keys before values.
        column(
            megatron_prefix + "linear_kv_up_proj.weight",
            checkpoint_prefix + "kv_b_proj.weight",
            (attention.num_heads * head_channels, latent_channels),
        ),
        row(
            megatron_prefix + "linear_proj.weight",
            checkpoint_prefix + "o_proj.weight",
            (hidden, attention.value_channels),
        ),
    )


def vllm_stacks(model: ModelShape) -> tuple[stacks.Stack, ...]:
    """Return vLLM's parameters as stacks of Hugging Face tensors.

    In models with a latent vector of queries (`q_a_proj`), vLLM joins the down projections of queries and keys into one
    parameter, equal on all ranks.
    """
    attention, mlp = llama.LAYER + "self_attn.", llama.LAYER + "mlp."
    down_projections = tuple(
        stacks.Part(f"{attention}{name}.weight", "copy") for name in ("q_a_proj", "kv_a_proj_with_mqa")
    )
    # vLLM splits these by heads over its ranks, each a parameter of its own.
    head_projections = tuple(f"{attention}{name}.weight" for name in ("q_proj", "q_b_proj", "kv_b_proj"))
    # The standard stack qkv_proj would take q_proj, which is a separate parameter here.
    inherited_stacks = (stack for stack in stacks.standard(model) if "qkv_proj" not in stack.storage)
    return (
        *inherited_stacks,
        *stacks.feed_forward(mlp + "shared_experts."),
        stacks.Stack(attention + "fused_qkv_a_proj.weight", 0, down_projections),
        *(stacks.Stack(name, 0, (stacks.Part(name, "even"),)) for name in head_projections),
        stacks.float32(mlp + "gate.e_score_correction_bias"),
    )


FIELDS = {
    **DEFAULTS,
    "max_position_embeddings": 4096,
    "n_group": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
}
"""Values of missing fields in DeepSeek-V3 models."""

FAMILY = Family(
    "DeepseekV3ForCausalLM",
    read,
    rules,
    FIELDS,
    added_fields,
    stacks=vllm_stacks,
    # Moonlight is a deepseek_v3 model, Kimi-K2 has a model_type of its own, known to vLLM.
    other_model_types=("kimi_k2",),
    draft_layers=NUMBERED,
)
