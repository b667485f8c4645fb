"""Overrides of fields of a model's config.json (`model.override_config`): permitted fields, and their application."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
_NOT_SCALING = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Rotary settings that choose the rotating channels. A changed scaling leaves them unchanged."""
OVERRIDABLE = (*_ROPE, "max_position_embeddings", "rms_norm_eps", "num_experts_per_tok", "norm_topk_prob")
"""Fields of config.json that may be overridden. They change the computation, not the shapes of weights."""

_SHAPES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "tie_word_embeddings", "num_experts", "num_local_experts", "moe_intermediate_size",
    "shared_expert_intermediate_size", "n_routed_experts", "n_shared_experts", "first_k_dense_replace",
    "mlp_only_layers", "decoder_sparse_step", "num_nextn_predict_layers", "attention_bias", "use_qk_norm",
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "layer_types",
    "full_attention_interval", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim",
)  # fmt: skip
_REASONS = {
    **dict.fromkeys(_SHAPES, "it determines the shapes of the folder's weights"),
    **dict.fromkeys(
        ("architectures", "model_type", "quantization_config", "auto_map", "id2label"),
        "it identifies the model of the folder's weights",
    ),
    **dict.fromkeys(("dtype", "torch_dtype"), "set model.dtype instead"),
}


def override_fault(override: Mapping[str, Any]) -> str | None:
    """Return the first error in the overrides, or None. A later check tests whether megarl supports the values."""
    for name, value in override.items():
        if name not in OVERRIDABLE:
            reason = _REASONS.get(name, "it is not a permitted field")
            return f"{name} cannot be changed: {reason}; permitted are {', '.join(OVERRIDABLE)}"
        if fault := _find_value_fault(name, value):
            return f"{name} is {value!r:.60}; give {fault}"
    if override.keys() >= {"rope_scaling", "rope_parameters"}:
        return "rope_scaling and rope_parameters are two names of one thing; remove one"
    return None


def _find_value_fault(name: str, value: Any) -> str | None:
    """Return the permitted values of an overridden field in words if the value is wrong, else None."""
    if name in ("rope_scaling", "rope_parameters"):
        return None if value is None or isinstance(value, Mapping) else "rope_type and its parameters, or null"
    if name == "norm_topk_prob":
        return None if isinstance(value, bool) else "true or false"
    if name in ("max_position_embeddings", "num_experts_per_tok"):
        return None if type(value) is int and value > 0 else "a whole number above 0"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return None if is_number and value > 0 else "a number above 0"


def apply_override(config: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json with the overrides applied.

    Rotary settings stay in the file's form: rope_parameters (transformers 5), or rope_theta and rope_scaling
    (transformers 4). An override of rope_theta changes only the base. An override of rope_scaling changes neither the
    base nor the fraction of rotated channels.
    """
    new_config = {**config, **{name: value for name, value in override.items() if name not in _ROPE}}
    if not override.keys() & set(_ROPE):
        return new_config
    rotary_settings = rope_parameters(config)
    for name in ("rope_scaling", "rope_parameters"):
        if name in override:
            unscaled_settings = {
                field: rotary_settings[field] for field in ("rope_theta", *_NOT_SCALING) if field in rotary_settings
            }
            rotary_settings = {**unscaled_settings, **_scaling(override[name])}
    if "rope_theta" in override:
        rotary_settings["rope_theta"] = override["rope_theta"]
    # Write the settings back in the form of the file.
    if "rope_parameters" in config:
        return new_config | {"rope_parameters": rotary_settings}
    separate_fields = {
        name: rotary_settings.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rotary_settings
    }
    # transformers 4 writes null for a default rope_scaling.
    return (
        new_config
        | separate_fields
        | {"rope_scaling": None if rotary_settings["rope_type"] == "default" else rotary_settings}
    )


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of a config.json in transformers 5's form: {rope_theta, rope_type, ...}."""
    separate_fields = {
        name: config[name] for name in ("rope_theta", "partial_rotary_factor") if config.get(name) is not None
    }
    return {**separate_fields, **_scaling(config.get("rope_parameters") or config.get("rope_scaling"))}


def engine_overrides(
    config: Mapping[str, Any], override: Mapping[str, Any], rope: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the overrides as vLLM's `hf_overrides`.

    vLLM replaces a field as a whole, so rotary settings must be complete. `rope` has those that config.json may lack.
    """
    plain_overrides = {name: value for name, value in override.items() if name not in _ROPE}
    if len(plain_overrides) == len(override):
        return plain_overrides
    return plain_overrides | {"rope_parameters": {**(rope or {}), **rope_parameters(apply_override(config, override))}}


def _scaling(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return rotary parameters with the key rope_type, which older files call type."""
    scaling = dict(parameters or {})
    rope_type = scaling.pop("type", "default")
    return {"rope_type": rope_type, **scaling}
