"""Megatron-Core's settings of a model's architecture, by the names of TransformerConfig.

Models in memory (`models.configuration`) and checkpoints for Megatron-LM (`checkpoint.torch_dist`) use them.
"""

from __future__ import annotations

from typing import Any

from megarl.families.parts import Latent, Router
from megarl.families.shape import ModelShape
from megarl.types import ConfigError


def architecture_settings(shape: ModelShape) -> dict[str, Any]:
    """Return all settings except the experts'. Raises ConfigError for sliding windows of several sizes."""
    attention = shape.attention
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "add_bias_linear": False,
        "add_qkv_bias": attention.qkv_bias,
        "qk_layernorm": attention.qk_norm,
        "attention_output_gate": attention.has_output_gate,
        "normalization": "RMSNorm",
        **_window_settings(shape),
        **_linear_attention_settings(shape),
        **(_latent_settings(attention, shape) if isinstance(attention, Latent) else {}),
    }


def _window_settings(shape: ModelShape) -> dict[str, Any]:
    sizes = {window for window in shape.windows if window}
    if not sizes:
        return {}
    if len(sizes) > 1:
        raise ConfigError(
            f"the model has sliding windows of several sizes, {sorted(sizes)} tokens; only one size per model is "
            "supported."
        )
    # Megatron counts the tokens before the query, without the query itself.
    return {
        "window_size": (sizes.pop() - 1, 0),
        "window_attn_skip_freq": [int(window > 0) for window in shape.windows],
    }


def router_settings(router: Router, shape: ModelShape) -> dict[str, Any]:
    has_groups, is_sigmoid = router.num_groups > 1, router.score == "sigmoid"
    return {
        # Not a list for models with experts in all layers: with a list, Megatron-Core's checkpoints are
        # non-homogeneous.
        "moe_layer_freq": [int(kind.has_experts) for kind in shape.layers] if shape.has_dense_layers else 1,
        "moe_ffn_hidden_size": router.moe_intermediate_size,
        "moe_router_topk": router.top_k,
        "moe_router_score_function": router.score,
        # Without normalisation over the chosen experts, the softmax ran over all experts, before the choice.
        "moe_router_pre_softmax": not is_sigmoid and not router.norm_topk_prob,
        "moe_router_enable_expert_bias": router.has_bias,
        # Megatron-Core 0.16.1 would move the biases in every update. The engine and old log-probs need them fixed.
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": router.scale if router.scale != 1.0 else None,
        "moe_router_num_groups": router.num_groups if has_groups else None,
        "moe_router_group_topk": router.top_groups if has_groups else None,
        "moe_shared_expert_intermediate_size": router.shared_intermediate_size or None,
        "moe_shared_expert_gate": router.has_shared_gate,
    }


def _linear_attention_settings(shape: ModelShape) -> dict[str, Any]:
    linear = shape.linear_attention
    if linear is None:
        return {}
    return {
        "linear_attention_freq": [int(kind.mixer == "linear_attention") for kind in shape.layers],
        **linear.megatron_settings(),
    }


def _latent_settings(attention: Latent, shape: ModelShape) -> dict[str, Any]:
    return {
        "multi_latent_attention": True,
        "q_lora_rank": attention.query_rank or None,
        "kv_lora_rank": attention.kv_rank,
        "qk_head_dim": attention.plain_channels,
        "qk_pos_emb_head_dim": attention.rotary_channels,
        "v_head_dim": attention.value_head_dim,
        "rotary_scaling_factor": shape.rotary.factor,
        "mscale_all_dim": shape.rotary.score_mscale,
    }
