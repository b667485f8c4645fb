"""Rotary position embeddings (RoPE) of a model, read from config.json. No torch.

Supported: unscaled, linear interpolation, Llama 3's scaling, and YaRN (arXiv:2309.00071). vLLM 0.30 applies `dynamic`
scaling only beyond `max_position_embeddings`, and refuses such lengths. So `dynamic` equals no scaling here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megarl.families.config_json.config_values import flag, mapping, positive, quote
from megarl.types import DataError

Scaling = Literal["default", "linear", "llama3", "yarn"]

_FIELDS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale",
            "mscale_all_dim", "truncate",
        }
    ),
}  # fmt: skip
"""Parameters of each rope_type that both transformers and vLLM read."""

_ORIGINAL = "original_max_position_embeddings"
_REQUIRED: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": _FIELDS["linear"],
    "dynamic": frozenset({"factor"}),
    "llama3": _FIELDS["llama3"],
    "yarn": frozenset({"factor", _ORIGINAL}),
}
"""Parameters that each rope_type needs. transformers and vLLM have defaults for some of them; megarl has none."""

_NAMES = frozenset({"rope_type", "type", "rope_theta"})
_FRACTION = "partial_rotary_factor"


@dataclass(frozen=True, slots=True)
class Rotary:
    """Settings of a model's rotary embeddings, from which `models.rotary` computes the frequencies."""

    theta: float
    """Base of the frequencies."""
    fraction: float = field(default=1.0, kw_only=True)
    """Fraction of a head's channels that rotate: the first ones."""
    scaling: Scaling = "default"
    factor: float = 1.0
    """Ratio of the extended context to the trained one."""
    original_positions: float = 0.0
    """Context length of the pretraining, in tokens (llama3, yarn)."""
    low_factor: float = 1.0
    """llama3: wavelengths above original_positions / low_factor are divided by `factor`."""
    high_factor: float = 4.0
    """llama3: wavelengths below original_positions / high_factor are unchanged."""
    beta_fast: float = 32.0
    """yarn: dimensions with more rotations than this over the original context are unchanged."""
    beta_slow: float = 1.0
    """yarn: dimensions with fewer rotations than this over the original context are divided by `factor`."""
    attention_factor: float = 1.0
    """yarn: factor of the cosines and sines. Attention scores are scaled by its square."""
    score_mscale: float = 0.0
    """yarn with latent attention: attention scores are multiplied by (0.1 * score_mscale * ln(factor) + 1)^2."""
    truncate: bool = True
    """yarn: whether the borders of the ramp are rounded to whole dimensions."""


def rope_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary settings without nulls, in the form of transformers 4 or 5. Raises DataError if both differ."""
    # transformers 5 has all settings in rope_parameters; transformers 4 in rope_scaling, the base in rope_theta.
    newer, older = (
        {name: value for name, value in mapping(config, field).items() if value is not None}
        for field in ("rope_parameters", "rope_scaling")
    )
    if newer and older and newer != older:
        raise DataError(
            f"rope_parameters is {quote(newer)} and rope_scaling is {quote(older)}: two names of one setting with "
            "different values; remove one."
        )
    return newer or older


def read_rotary(config: Mapping[str, Any], *, fraction: float | None = None) -> Rotary:
    """Return the rotary embeddings in a config.json of transformers 4 or 5. Raises DataError for unsupported settings.

    `fraction` is the family's default of `partial_rotary_factor`; None: the family rotates all channels.
    """
    settings = dict(rope_settings(config))
    stored_fraction = settings.pop(_FRACTION, config.get(_FRACTION))
    default_fraction = 1.0 if fraction is None else fraction
    rotated_fraction = (
        default_fraction if stored_fraction is None else positive({_FRACTION: stored_fraction}, _FRACTION)
    )
    if rotated_fraction > 1:
        raise DataError(f"{_FRACTION} is {rotated_fraction}; it must be at most 1.")
    if fraction is None and rotated_fraction != 1:
        # transformers applies it to some types of scaling only, vLLM 0.30 to all.
        raise DataError(f"{_FRACTION} is {rotated_fraction}; models of this family rotate all channels: remove it.")
    return replace(_read_rotary(config, settings), fraction=rotated_fraction)


def _read_rotary(config: Mapping[str, Any], settings: Mapping[str, Any]) -> Rotary:
    """Return the rotary embeddings for the settings of `rope_settings`, all channels rotated."""
    theta = positive(settings if "rope_theta" in settings else config, "rope_theta")
    scaling_type = settings.get("rope_type", settings.get("type", "default"))
    if scaling_type not in _FIELDS:
        raise DataError(f"rope_type {scaling_type} is not supported; supported are {', '.join(_FIELDS)}.")
    if unknown_names := sorted(settings.keys() - _FIELDS[scaling_type] - _NAMES):
        raise DataError(f"rope parameter {unknown_names[0]} is not supported with rope_type {scaling_type}; remove it.")
    for name in sorted(_REQUIRED[scaling_type] - settings.keys()):
        raise DataError(f"rope parameter {name} is missing; rope_type {scaling_type} needs it.")
    if scaling_type in ("default", "dynamic"):
        return Rotary(theta)
    factor = positive(settings, "factor")
    if scaling_type == "linear":
        return Rotary(theta, "linear", factor)
    original_positions = positive(settings, _ORIGINAL)
    # transformers and vLLM prefer this field to the rope parameter.
    if config.get(_ORIGINAL) not in (None, original_positions):
        raise DataError(
            f"{_ORIGINAL} is {quote(config[_ORIGINAL])}, but the rope parameter of this name is "
            f"{original_positions:g}; remove one."
        )
    if scaling_type == "llama3":
        low_factor, high_factor = positive(settings, "low_freq_factor"), positive(settings, "high_freq_factor")
        if not low_factor < high_factor:
            raise DataError(f"low_freq_factor {low_factor} must be smaller than high_freq_factor {high_factor}.")
        return Rotary(theta, "llama3", factor, original_positions, low_factor=low_factor, high_factor=high_factor)
    return _read_yarn(config, settings, Rotary(theta, "yarn", factor, original_positions))


def _read_yarn(config: Mapping[str, Any], settings: Mapping[str, Any], rotary: Rotary) -> Rotary:
    """Return YaRN's `rotary` with the other settings. Raises DataError if it does not cover the model's context."""
    factor, original_positions = rotary.factor, rotary.original_positions
    if factor < 1:
        raise DataError(f"rope parameter factor {factor}: YaRN extends the context; use a factor of at least 1.")
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and positions > original_positions * factor:
        # vLLM 0.30 has cosines and sines for original * factor positions, and reads beyond them without an error.
        raise DataError(
            f"max_position_embeddings {positions} exceeds original_max_position_embeddings * factor = "
            f"{original_positions * factor:g}; lower it or raise the factor."
        )
    # Defaults of transformers and vLLM 0.30.
    parameters = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, **settings}
    return replace(
        rotary,
        beta_fast=positive(parameters, "beta_fast"),
        beta_slow=positive(parameters, "beta_slow"),
        attention_factor=_read_attention_factor(settings, factor),
        truncate=flag(parameters, "truncate"),
    )


def _read_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """Return YaRN's factor of cosines and sines, derived as in transformers 5 and vLLM 0.30."""
    if rope.get("attention_factor") is not None:
        return positive(rope, "attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        numerator, denominator = (_concentration(factor, positive(rope, name)) for name in ("mscale", "mscale_all_dim"))
        return numerator / denominator
    return _concentration(factor, 1.0)


def _concentration(factor: float, mscale: float) -> float:
    """Return 0.1 * mscale * ln(factor) + 1 (YaRN, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0
