"""Megatron's TransformerConfig, made from a model's sizes and the trainer's settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.tensor_parallel import layers as tensor_parallel_layers
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megarl.config.libraries.library_settings import find_setting_faults, reserved_settings
from megarl.config.parallel import ParallelConfig
from megarl.families.megatron_settings import architecture_settings, router_settings
from megarl.families.parts import Latent, Router
from megarl.families.registry import FAMILIES
from megarl.families.shape import ModelShape
from megarl.files.nearest import nearest
from megarl.models.partial_rotary import scales_rotated_channels
from megarl.platform import transformer_engine
from megarl.types import ConfigError

_ACTIVATIONS = {"quick_gelu": quick_gelu}
"""Activation functions by name. Families use names, because they do not import Megatron."""


def transformer_engine_problem() -> str | None:
    """Return the reason why Transformer Engine's layers cannot be used; None if they can."""
    if not torch.cuda.is_available():
        return "CUDA is not available"
    if not transformer_engine.is_installed():
        return "Transformer Engine is not installed"
    return None


def uses_transformer_engine() -> bool:
    """Return whether Transformer Engine's layers are used: it is installed and CUDA is available."""
    return transformer_engine_problem() is None


def transformer_config(
    shape: ModelShape,
    parallel: ParallelConfig,
    *,
    dtype: torch.dtype,
    sequence_parallel: bool,
    recompute: str = "none",
    recompute_modules: Sequence[str] = ("core_attn",),
    router_replay: bool = False,
    moe_dispatcher: str = "alltoall",
    fp8: str = "none",
    exact: bool = False,
    overrides: Mapping[str, Any],
) -> TransformerConfig:
    """Return the TransformerConfig of a rank's model.

    `exact` models pass float32 hidden states from layer to layer. Experts all on one rank always use the dispatcher
    `alltoall`. Raises ConfigError for an unknown override, an override without effect, or one that another field sets.
    """
    config_type = MLATransformerConfig if isinstance(shape.attention, Latent) else TransformerConfig
    _check_overrides(config_type, shape, overrides)
    # A user cannot override `settings`: they follow from the model and the recipe. `defaults` can be overridden.
    settings = _model_settings(shape) | _parallel_settings(parallel, dtype, sequence_parallel)
    settings |= {"pipeline_model_parallel_layout": _uneven_stages(shape, parallel)}
    defaults: dict[str, Any] = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": shape.initializer_range,
        **_fused_kernels(),
    }
    settings |= _recompute_settings(recompute, recompute_modules)
    if shape.router:
        settings |= _expert_settings(shape.router, shape, parallel) | {"moe_enable_routing_replay": router_replay}
        if moe_dispatcher == "flex" and parallel.etp * parallel.ep > 1:
            settings |= {"moe_token_dispatcher_type": "flex"}
        # A balancing loss changes the policy's gradient, so it is off unless a coefficient is set.
        balancing = "aux_loss" if overrides.get("moe_aux_loss_coeff") else "none"
        defaults |= {"moe_router_load_balancing_type": balancing, "moe_aux_loss_coeff": 0.0}
        defaults |= _fused_expert_kernels(router_replay)
    if exact:
        settings |= {"fp32_residual_connection": True, "pipeline_dtype": torch.float32}
    if fp8 == "blockwise":
        settings |= {"fp8": "e4m3", "fp8_recipe": "blockwise"}
    if settings.get("softmax_type", "vanilla") != "vanilla":
        # Models with sinks use one rotary angle per token; Transformer Engine's fused kernel needs one per position.
        settings["apply_rope_fusion"] = False
    overrides = _without_apex(overrides)
    for name in sorted(overrides.keys() & (settings.keys() | reserved_settings("architecture").keys())):
        raise ConfigError(f"trainer.megatron.{name}: follows from the model and the recipe's other fields; remove it.")
    try:
        return config_type(**(defaults | settings | dict(overrides)))
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"trainer.megatron: Megatron-Core refuses these settings: {error}") from None


def _check_overrides(config_type: type[TransformerConfig], shape: ModelShape, overrides: Mapping[str, Any]) -> None:
    """Raise ConfigError for an override that Megatron does not know, or that has no effect."""
    field_names = {field.name for field in dataclasses.fields(config_type)}
    for name in sorted(overrides.keys() - field_names):
        nearest_name = nearest(name, field_names)
        hint = f" Did you mean {nearest_name}?" if nearest_name else ""
        raise ConfigError(f"trainer.megatron.{name}: Megatron-Core's TransformerConfig has no such field.{hint}")
    for problem in find_setting_faults(overrides, has_experts=bool(shape.num_experts)):
        raise ConfigError(problem)


def _recompute_settings(recompute: str, modules: Sequence[str]) -> dict[str, Any]:
    if recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(modules)}
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {}


@contextmanager
def name_refused_overrides(overrides: Mapping[str, Any]) -> Iterator[None]:
    """Context that turns Megatron-Core's errors into a ConfigError naming `trainer.megatron`.

    Without `overrides`, errors pass unchanged: the recipe is not their cause.
    """
    try:
        yield
    except (AssertionError, ValueError, TypeError, NotImplementedError) as error:
        if not overrides:
            raise
        fields = ", ".join(f"trainer.megatron.{name} = {value!r}" for name, value in overrides.items())
        raise ConfigError(f"{fields}. Megatron-Core refuses it: {error}") from error


def accumulates_in_transformer_engine(config: TransformerConfig, overrides: Mapping[str, Any]) -> bool:
    """Return whether Transformer Engine's linear layers add weight gradients directly to Megatron's float32 gradients.

    Megatron's flag `gradient_accumulation_fusion` also requires apex, for Megatron's own layers. Without apex, the flag
    is set for Transformer Engine's layers only.
    """
    is_fused = overrides.get("gradient_accumulation_fusion", True)
    return uses_transformer_engine() and is_fused and not config.gradient_accumulation_fusion


def _without_apex(overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the overrides, without `gradient_accumulation_fusion` if apex is not installed.

    `accumulates_in_transformer_engine` then sets the flag for Transformer Engine's layers. Raises ConfigError if
    neither apex nor Transformer Engine is installed.
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
    """Return Megatron's settings for fused kernels with unchanged results."""
    return {
        # Without this fusion, Megatron-Core 0.16.1 reads every sequence's length from the GPU, twice in each layer.
        "apply_rope_fusion": uses_transformer_engine(),
        "bias_activation_fusion": torch.cuda.is_available(),
        # Only Megatron's own local attention has this kernel, and it is not used for packed rows.
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": torch.cuda.is_available()
        and tensor_parallel_layers._grad_accum_fusion_available,
    }


def _fused_expert_kernels(router_replay: bool) -> dict[str, bool]:
    # The fused router always chooses the experts itself, so Megatron-Core 0.16.1 cannot replay choices through it.
    return {
        "moe_permute_fusion": uses_transformer_engine(),
        "moe_router_fusion": uses_transformer_engine() and not router_replay,
    }


def _expert_settings(router: Router, shape: ModelShape, parallel: ParallelConfig) -> dict[str, Any]:
    return {
        **router_settings(router, shape),
        "num_moe_experts": router.num_experts,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": uses_transformer_engine(),
        # The dispatcher `flex` uses DeepEP. Megatron-Core 0.16.1 no longer selects it by DeepEP's own flag.
        "moe_flex_dispatcher_backend": "deepep",
        "moe_enable_deepep": False,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
    }


def _model_settings(shape: ModelShape) -> dict[str, Any]:
    # Linear attention does not set the field `experimental_attention_variant`: with it Megatron-Core 0.16.1 refuses
    # context parallelism.
    return (
        _score_scale(shape)
        | architecture_settings(shape)
        | {
            "layernorm_zero_centered_gamma": shape.has_zero_centered_norms,
            "layernorm_epsilon": shape.norm_epsilon,
            "gated_linear_unit": True,
            "activation_func": F.silu,
        }
        | (_latent_settings(shape) if isinstance(shape.attention, Latent) else {})
        | _family_settings(shape)
    )


def _score_scale(shape: ModelShape) -> dict[str, float]:
    """Return the setting for YaRN's attention factor, if it multiplies whole attention scores.

    YaRN multiplies the cosines and sines of queries and keys. If all channels rotate, scaling the scores by the square
    of the factor is the same (else see `partial_rotary`). Transformer Engine's fused kernel for packed rows ignores
    Megatron's own factor (Megatron-Core 0.16.1). Latent attention applies the factor itself.
    """
    factor = shape.rotary.attention_factor
    if factor == 1.0 or isinstance(shape.attention, Latent) or scales_rotated_channels(shape):
        return {}
    return {"softmax_scale": shape.head_dim**-0.5 * factor**2}


def _family_settings(shape: ModelShape) -> dict[str, Any]:
    settings = dict(FAMILIES[shape.family].settings(shape))
    if "activation_func" in settings:
        settings["activation_func"] = _ACTIVATIONS[settings["activation_func"]]
    return settings


def _latent_settings(shape: ModelShape) -> dict[str, Any]:
    return {
        # If no scaling is set, the factor is 1 and YaRN equals plain embeddings. The type `rope` would do the same, but
        # Megatron-Core 0.16.1 refuses its fused kernel.
        "rope_type": "yarn",
        "rotary_base": shape.rotary.theta,
    }


def _uneven_stages(shape: ModelShape, parallel: ParallelConfig) -> list[list[str]] | None:
    """Return Megatron's description of the layers of each chunk if chunks differ in their number of layers; else None.

    Equal chunks use Megatron's default: other programs have the same checkpoint keys.
    """
    sizes = parallel.layers_by_chunk(shape.num_layers)
    if len(set(sizes)) == 1:
        return None
    chunks = [["decoder"] * size for size in sizes]
    return [["embedding", *chunks[0]], *chunks[1:-1], [*chunks[-1], "loss"]]


def _parallel_settings(parallel: ParallelConfig, dtype: torch.dtype, sequence_parallel: bool) -> dict[str, Any]:
    """Return the settings that follow from the dtype and the sizes of parallelism."""
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp if parallel.vpp > 1 else None,
        "context_parallel_size": parallel.cp,
        # With several chunks both neighbours of a stage may be the same rank. Batched sends would mix up their
        # directions.
        "overlap_p2p_comm": parallel.vpp > 1,
        "batch_p2p_comm": parallel.vpp == 1,
        # Megatron's wait for the whole device after each exchange works around an error of old PyTorch releases.
        "batch_p2p_sync": False,
        "sequence_parallel": sequence_parallel,
        "use_cpu_initialization": not torch.cuda.is_available(),
        # Packed rows differ in length. With this setting, Megatron asks `training.stage_shapes` for each length.
        # Megatron-Core 0.16.1 accepts it only with this dispatcher, even in dense models.
        "variable_seq_lengths": parallel.pp > 1,
        "moe_token_dispatcher_type": "alltoall",
        # gloo still reads an output after its send returns. Freeing it is safe only in CUDA's stream order.
        "deallocate_pipeline_outputs": torch.cuda.is_available() and parallel.pp > 1,
        # Makes Megatron's schedules sum the losses of micro-batches instead of averaging: the token weights are
        # normalised.
        "calculate_per_token_loss": True,
    }
