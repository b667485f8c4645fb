"""Megatron's layer specs: one for each kind of layer, and the layers of a model chunk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megarl.families.parts import LayerKind
from megarl.families.shape import ModelShape
from megarl.models import latent_attention
from megarl.models.attention import PackedAttention
from megarl.models.configuration import uses_transformer_engine
from megarl.models.delta_net.layer import with_delta_net
from megarl.models.exact.attention import ExactAttention
from megarl.models.exact.experts import ExactExperts, ExactMoELayer, ExactRouter
from megarl.models.exact.residual import wide_addition
from megarl.models.exact.rotary import RotaryTable
from megarl.models.exact.row_parallel import BlockRowParallelLinear
from megarl.models.experts.balance import UpdateRouter, needs_update_router
from megarl.models.experts.dispatch import ReplayedMoELayer, takes_known_counts
from megarl.models.experts.layers import OwnOutput, has_router
from megarl.models.gated_attention import GatedAttention
from megarl.models.norms import RMSNorm
from megarl.models.partial_rotary import scale_rotated_queries, scales_rotated_channels
from megarl.models.trees.core_attention import with_trees


def block_spec(config: TransformerConfig, shape: ModelShape, vp_stage: int | None, *, exact: bool = False) -> Any:
    """Return the spec of a chunk's layers. `exact` layers round like the engine."""
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
    kinds = shape.layers[offset : offset + get_num_layers_to_build(config, vp_stage=vp_stage)]
    # Layers that differ only in their window share a spec: attention reads the window from the layer's number.
    specs = {kind: layer_spec(config, shape, kind, exact=exact) for kind in {kind._replace(window=0) for kind in kinds}}
    layers = [specs[kind._replace(window=0)] for kind in kinds]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=final_norm())


def has_sinks(config: TransformerConfig) -> bool:
    """Return whether attention has sinks. Transformer Engine 2.11 has no kernel for sinks in packed rows."""
    return config.softmax_type != "vanilla"


def layer_spec(config: TransformerConfig, shape: ModelShape, kind: LayerKind, *, exact: bool = False) -> Any:
    """Return the spec of one kind of layer: Transformer Engine's if usable, else Megatron's local spec.

    The local spec uses this package's norm and attention. `UpdateRouter` replaces routers with balancing losses or
    noise. An `exact` layer has the local spec, and the operators of `models.exact`.
    """
    num_experts = config.num_moe_experts if kind.has_experts else None
    common: dict[str, Any] = {
        "num_experts": num_experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
    }
    if uses_transformer_engine():
        layer = _make_transformer_engine_layer(config, common)
    else:
        layer = _make_local_layer(config, common, kind, exact=exact)
    # Variants of attention that some families need, with either implementation.
    if kind.mixer == "attention" and scales_rotated_channels(shape):
        modules: Any = layer.submodules
        attention = modules.self_attention.submodules
        attention.core_attention = scale_rotated_queries(attention.core_attention, shape)
    if config.attention_output_gate and kind.mixer == "attention":
        gated_modules: Any = layer.submodules
        gated_modules.self_attention.module = GatedAttention
    if kind.mixer == "linear_attention":
        layer = with_delta_net(layer, transformer_engine=uses_transformer_engine())
    # megarl's router applies balancing losses and noise; its MoE layer takes the routes of the rollout.
    final_modules: Any = layer.submodules
    if kind.has_experts and needs_update_router(config):
        final_modules.mlp.submodules.router = UpdateRouter
    if kind.has_experts and takes_known_counts(config):
        final_modules.mlp.module = ReplayedMoELayer
    return layer


def _make_transformer_engine_layer(config: TransformerConfig, common: Mapping[str, Any]) -> Any:
    """Return Transformer Engine's spec. Its attention also takes trees; with sinks it is this package's."""
    layer = get_gpt_layer_with_transformer_engine_spec(**common)
    if config.multi_latent_attention:
        latent_attention.use_transformer_engine_modules(layer)
    else:
        modules: Any = layer.submodules
        attention = modules.self_attention.submodules
        attention.core_attention = with_trees(PackedAttention if has_sinks(config) else attention.core_attention)
    return layer


def _make_local_layer(config: TransformerConfig, common: Mapping[str, Any], kind: LayerKind, *, exact: bool) -> Any:
    """Return Megatron's local spec with this package's norm and attention, or with the `exact` operators."""
    layer = get_gpt_layer_local_spec(**common, normalization="RMSNorm")
    modules: Any = layer.submodules
    modules.input_layernorm = modules.pre_mlp_layernorm = RMSNorm
    attention = modules.self_attention.submodules
    attention.core_attention = ExactAttention if exact else with_trees(PackedAttention)
    if exact:
        modules.self_attn_bda = modules.mlp_bda = wide_addition
        attention.linear_proj = BlockRowParallelLinear
        feed_forward = modules.mlp.submodules
        if kind.has_experts:
            modules.mlp.module, feed_forward.router = ExactMoELayer, ExactRouter
            feed_forward.experts.module = ExactExperts
            feed_forward = feed_forward.experts.submodules
        feed_forward.linear_fc2 = BlockRowParallelLinear
    if config.multi_latent_attention:
        latent_attention.use_local_modules(layer, RMSNorm)
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if kind.has_experts and config.add_bias_linear:
        modules.mlp.submodules.experts.submodules.linear_fc2 = OwnOutput
    return layer


def complete_exact_layers(
    layers: Iterable[Any], config: TransformerConfig, rotary: RotaryTable, num_blocks: int
) -> None:
    """Set the rotary table of built exact layers, and the blocks of their row-parallel products.

    `num_blocks`: blocks of a product over all ranks.
    """
    blocks_of_rank = num_blocks // config.tensor_model_parallel_size
    expert_blocks_of_rank = num_blocks // (config.expert_tensor_parallel_size or 1)
    for layer in layers:
        layer.self_attention.core_attention.rotary = rotary
        layer.self_attention.linear_proj.num_blocks = blocks_of_rank
        if has_router(layer):
            for expert in layer.mlp.experts.local_experts:
                expert.linear_fc2.num_blocks = expert_blocks_of_rank
        else:
            layer.mlp.linear_fc2.num_blocks = blocks_of_rank


def final_norm() -> Any:
    if not uses_transformer_engine():
        return RMSNorm
    # Only importable with Transformer Engine.
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm
