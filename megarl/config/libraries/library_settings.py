"""Settings passed on to Megatron-Core and vLLM (trainer.megatron, rollout.vllm): reserved ones, and ones without
effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from megarl.config.annotations import Decides
from megarl.config.schema import all_fields, annotated_with

_MODEL = "the model's config.json"
_OTHERWISE = {
    "megatron": {
        **dict.fromkeys(
            (
                "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
                "kv_channels", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "normalization",
                "attention_output_gate", "layernorm_zero_centered_gamma", "layernorm_epsilon",
                "gated_linear_unit", "activation_func",
            ),
            _MODEL,
        ),
        "use_cpu_initialization": "the device",
        "calculate_per_token_loss": "the token weights of the loss",
    },
    "experts": {
        **dict.fromkeys(
            (
                "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_router_pre_softmax",
                "moe_router_dtype", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_layer_freq",
                "moe_router_num_groups", "moe_router_group_topk", "moe_router_score_function",
                "moe_router_enable_expert_bias", "moe_router_bias_update_rate", "moe_router_topk_scaling_factor",
            ),
            _MODEL,
        ),
        "moe_grouped_gemm": "whether Transformer Engine is installed",
    },
    "architecture": dict.fromkeys(
        (
            "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
            "rope_type", "rotary_base", "rotary_percent", "rotary_scaling_factor", "rotary_interleaved", "mscale",
            "mscale_all_dim", "original_max_position_embeddings", "beta_fast", "beta_slow",
            "experimental_attention_variant", "linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim",
            "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads", "softmax_scale", "softmax_type",
            "activation_func_clamp_value", "glu_linear_offset", "no_rope_freq", "qk_l2_norm", "moe_latent_size",
            "moe_apply_probs_on_input", "moe_router_topk_limited_devices",
        ),
        _MODEL,
    ),
    "sinks": {"apply_rope_fusion": "the model's attention sinks: their packed rows have one rotary angle a token"},
}  # fmt: skip
"""Settings of Megatron-Core decided by neither users nor recipe fields, each with what decides it. Keys: the arguments
of `reserved_settings`.
"""


@cache
def reserved_settings(library: str) -> dict[str, str]:
    """Return the settings of a library that users cannot set, by name.

    The value says what decides the setting: recipe fields, or another source such as the model's config.json.

    `library` is vllm, or one of Megatron's groups of settings: megatron, experts, recompute, fp8, architecture (parts
    found in few models) and sinks (models with attention sinks). Recipe fields name the settings that they decide by
    the annotation `config.annotations.Decides`.
    """
    fields_by_setting: dict[str, list[str]] = {}
    for field in all_fields():
        for decides in annotated_with(field, Decides):
            for setting in getattr(decides, library, "").split():
                fields_by_setting.setdefault(setting, []).append(field)
    return _OTHERWISE.get(library, {}) | {setting: _join_names(fields) for setting, fields in fields_by_setting.items()}


def _join_names(fields: list[str]) -> str:
    *leading, last = fields
    return f"{', '.join(leading)} and {last}" if leading else last


# Megatron-Core 0.16.1 accepts these fields without an error and without effect.
_UNREAD = {
    "attention_dropout": "attention over packed rows has no dropout; use hidden_dropout",
    "masked_softmax_fusion": "attention over packed rows has kernels of its own",
    "window_size": "config.json of the model decides about attention windows",
    "window_attn_skip_freq": "config.json of the model decides about attention windows",
    "cross_entropy_loss_fusion": "log-probs are computed in chunks, see trainer.logprob_chunk_tokens",
    "cross_entropy_fusion_impl": "log-probs are computed in chunks, see trainer.logprob_chunk_tokens",
    "moe_per_layer_logging": "the metrics train/moe_* are means over layers",
    "qk_clip": "updates do not clip the weights of queries and keys",
}

_BALANCING, _COEFFICIENT, _Z_COEFFICIENT = "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff"
_UNBALANCED = ("none", "sinkhorn")
_FORCED_BALANCE = "moe_router_force_load_balancing"


def find_setting_faults(settings: Mapping[str, Any], *, has_experts: bool) -> Iterator[str]:
    """Yield an error line for each field of `trainer.megatron` that does nothing, or with which the trainer's routers
    would choose other experts than the engines'.
    """
    for name, value in settings.items():
        assignment = f"trainer.megatron.{name} = {value!r}"
        if name in _UNREAD and value:
            yield f"{assignment}: has no effect: {_UNREAD[name]}; remove it"
        elif name.startswith("moe_") and value and not has_experts:
            yield f"{assignment}: has no effect: the model has no experts; remove it"
    if has_experts:
        yield from _find_routing_faults(settings)
        yield from _find_balancing_faults(settings)


def balance_losses(settings: Mapping[str, Any]) -> dict[str, float]:
    """Return the balancing losses of a model's MoE routers, with their non-zero coefficients.

    `settings` are fields of Megatron's configuration. A coefficient without a type belongs to the loss `aux_loss`.
    """
    loss_types, coefficients = settings.get(_BALANCING) or "aux_loss", settings.get(_COEFFICIENT) or 0.0
    if isinstance(loss_types, str):
        loss_types = [loss_types]
    if not isinstance(coefficients, list | tuple):
        coefficients = [coefficients]
    losses = dict(zip(loss_types, coefficients, strict=False)) | {"z_loss": settings.get(_Z_COEFFICIENT) or 0.0}
    return {name: coefficient for name, coefficient in losses.items() if coefficient}


def _find_routing_faults(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error line for each way of routing that engines and exported models do not have."""
    reason = "the trainer would choose other experts than the engines and the exported model"
    if settings.get(_FORCED_BALANCE):
        yield f"trainer.megatron.{_FORCED_BALANCE} = True: {reason}; remove it"
    kinds = settings.get(_BALANCING)
    if kinds == "sinkhorn" or (isinstance(kinds, list | tuple) and "sinkhorn" in kinds):
        yield f"trainer.megatron.{_BALANCING} = {kinds!r}: {reason}; use aux_loss, seq_aux_loss or global_aux_loss"


def _find_balancing_faults(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error line if a balancing loss of experts has a type but coefficient zero, or the reverse."""
    kinds, coefficient = settings.get(_BALANCING), settings.get(_COEFFICIENT)
    if kinds is None:
        return
    is_balanced = any(kind not in _UNBALANCED for kind in ([kinds] if isinstance(kinds, str) else kinds))
    has_weight = any(coefficient) if isinstance(coefficient, list | tuple) else bool(coefficient)
    if is_balanced and not has_weight:
        yield f"trainer.megatron.{_BALANCING} = {kinds!r}: has no effect: set trainer.megatron.{_COEFFICIENT}, too"
    elif has_weight and not is_balanced:
        yield (
            f"trainer.megatron.{_COEFFICIENT} = {coefficient!r}: has no effect with {_BALANCING} = {kinds!r}; "
            "remove one of the two"
        )
