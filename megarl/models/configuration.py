"""Megatron's TransformerConfig from a model's shape and the trainer's settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.tensor_parallel import layers as tensor_parallel_layers
from megatron.core.transformer import TransformerConfig

from megarl.config.idle_fields import without_effect
from megarl.config.parallel import ParallelConfig
from megarl.families.shape import ModelShape
from megarl.files.nearest import nearest
from megarl.platform import transformer_engine
from megarl.types import ConfigError


def transformer_engine_problem() -> str | None:
    """Why Transformer Engine's layers cannot be used; None where they can."""
    if not torch.cuda.is_available():
        return "there is no CUDA"
    if not transformer_engine.is_installed():
        return "Transformer Engine is not installed"
    return None


def uses_transformer_engine() -> bool:
    """Whether Transformer Engine's layers are used: they are where it is installed and CUDA is available."""
    return transformer_engine_problem() is None


def transformer_config(
    shape: ModelShape,
    layout: ParallelConfig,
    *,
    dtype: torch.dtype,
    sequence_parallel: bool,
    recompute: str = "none",
    recompute_modules: Sequence[str] = ("core_attn",),
    router_replay: bool = False,
    moe_dispatcher: str = "alltoall",
    fp8: str = "none",
    overrides: Mapping[str, Any],
) -> TransformerConfig:
    """The TransformerConfig of a rank's model. Experts that lie all on one rank need no dispatcher but `alltoall`.

    Raises ConfigError for an override that is unknown, has no effect, or that another field of the recipe determines.
    """
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    for name in sorted(overrides.keys() - known):
        near = nearest(name, known)
        hint = f" Did you mean {near}?" if near else ""
        raise ConfigError(f"trainer.megatron.{name}: Megatron-Core's TransformerConfig has no such field.{hint}")
    for problem in without_effect(overrides, has_experts=bool(shape.num_experts)):
        raise ConfigError(problem)
    settings = _model_settings(shape) | _split_settings(layout, dtype, sequence_parallel)
    defaults: dict[str, Any] = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": shape.initializer_range,
        **_fused_kernels(),
    }
    if recompute == "selective":
        settings |= {"recompute_granularity": "selective", "recompute_modules": list(recompute_modules)}
    elif recompute == "full":
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if shape.num_experts:
        settings |= _expert_settings(shape, layout) | {"moe_enable_routing_replay": router_replay}
        if moe_dispatcher == "flex" and layout.etp * layout.ep > 1:
            settings |= {"moe_token_dispatcher_type": "flex"}
        # Balancing pulls the policy away from the reward's gradient: it must be asked for.
        balancing = "aux_loss" if overrides.get("moe_aux_loss_coeff") else "none"
        defaults |= {"moe_router_load_balancing_type": balancing, "moe_aux_loss_coeff": 0.0}
        defaults |= _fused_expert_kernels(router_replay)
    if fp8 == "blockwise":
        settings |= {"fp8": "e4m3", "fp8_recipe": "blockwise"}
    overrides = _without_apex(overrides)
    for name in sorted(overrides.keys() & settings.keys()):
        raise ConfigError(f"trainer.megatron.{name}: follows from the model and the recipe's other fields; remove it.")
    try:
        return TransformerConfig(**(settings | defaults | dict(overrides)))
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"trainer.megatron: Megatron-Core refuses these settings: {error}") from None


@contextmanager
def refusals_named(overrides: Mapping[str, Any]) -> Iterator[None]:
    """Within it, what Megatron-Core refuses while building a model is an error of `trainer.megatron`, if that is set.

    Raises ConfigError.
    """
    try:
        yield
    except (AssertionError, ValueError, TypeError, NotImplementedError) as error:
        if not overrides:
            raise
        fields = ", ".join(f"trainer.megatron.{name} = {value!r}" for name, value in overrides.items())
        raise ConfigError(f"{fields}. Megatron-Core refuses it: {error}") from error


def accumulates_in_transformer_engine(config: TransformerConfig, overrides: Mapping[str, Any]) -> bool:
    """Whether Transformer Engine's linear layers add their weights' gradients to the float32 gradients themselves.

    Megatron's own flag for that, `gradient_accumulation_fusion`, also asks apex's kernel of its own layers; without
    apex only Transformer Engine's are told to.
    """
    wanted = overrides.get("gradient_accumulation_fusion", True)
    return uses_transformer_engine() and wanted and not config.gradient_accumulation_fusion


def _without_apex(overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    """Overrides that do not ask Megatron's own layers for apex's kernel where there is none.

    Transformer Engine's layers are told by `accumulates_in_transformer_engine`. Raises ConfigError without them.
    """
    name = "gradient_accumulation_fusion"
    if not overrides.get(name) or tensor_parallel_layers._grad_accum_fusion_available:
        return overrides
    if not uses_transformer_engine():
        raise ConfigError(
            f"trainer.megatron.{name} = True: needs Transformer Engine ({transformer_engine_problem()}) or apex's "
            "extension, which is not installed either; remove it."
        )
    return {**overrides, name: False}


def _fused_kernels() -> dict[str, bool]:
    """Fusions that need no other numbers than the model's; those of Megatron's own layers come with apex."""
    return {
        # Without it Megatron reads every sequence's length from the GPU, in each layer for queries and for keys.
        "apply_rope_fusion": uses_transformer_engine(),
        "bias_activation_fusion": torch.cuda.is_available(),
        # Packed rows never reach the layer that has it.
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": torch.cuda.is_available()
        and tensor_parallel_layers._grad_accum_fusion_available,
    }


def _fused_expert_kernels(router_replay: bool) -> dict[str, bool]:
    # The fused router chooses by itself: Megatron asks no replay about it.
    return {
        "moe_permute_fusion": uses_transformer_engine(),
        "moe_router_fusion": uses_transformer_engine() and not router_replay,
    }


def _expert_settings(shape: ModelShape, layout: ParallelConfig) -> dict[str, Any]:
    return {
        "num_moe_experts": shape.num_experts,
        "moe_router_topk": shape.top_k,
        "moe_ffn_hidden_size": shape.moe_intermediate_size,
        # Softmax before or after the choice: what is not normalised over the chosen was normalised over all.
        "moe_router_pre_softmax": not shape.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": shape.shared_intermediate_size or None,
        "moe_shared_expert_gate": shape.shared_intermediate_size > 0,
        "moe_grouped_gemm": uses_transformer_engine(),
        # Of the dispatcher `flex`; by its own flag Megatron takes DeepEP no longer.
        "moe_flex_dispatcher_backend": "deepep",
        "moe_enable_deepep": False,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }


def _model_settings(shape: ModelShape) -> dict[str, Any]:
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_epsilon,
        "gated_linear_unit": True,
        "activation_func": F.silu,
    }


def _split_settings(layout: ParallelConfig, dtype: torch.dtype, sequence_parallel: bool) -> dict[str, Any]:
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        # With several chunks both neighbours of a stage may be the same rank: sends must not be batched.
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
        "sequence_parallel": sequence_parallel,
        "use_cpu_initialization": not torch.cuda.is_available(),
        # Packed rows differ in length; Megatron sends such between stages only with this dispatcher named.
        "variable_seq_lengths": layout.pp > 1,
        "moe_token_dispatcher_type": "alltoall",
        "deallocate_pipeline_outputs": torch.cuda.is_available() and layout.pp > 1,
        "calculate_per_token_loss": True,
    }
