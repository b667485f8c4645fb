"""Rotary position embeddings (RoPE) of a model, read from config.json. No torch.

Supported: unscaled, linear interpolation, Llama 3's scaling, and YaRN (arXiv:2309.00071). vLLM 0.30 applies `dynamic`
scaling only beyond `max_position_embeddings`, a length that it refuses. So `dynamic` equals no scaling here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megarl.families.config_values import flag, mapping, positive
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
"""Parameters of each rope_type read by both transformers and vLLM."""

_NAMES = frozenset({"rope_type", "type", "rope_theta"})
_FRACTION = "partial_rotary_factor"


@dataclass(frozen=True, slots=True)
class Rotary:
    """Frequencies of a model's rotary embeddings. `models.rotary` computes them from these values."""

    theta: float
    """Base of the frequencies."""
    fraction: float = field(default=1.0, kw_only=True)
    """Fraction of a head's channels that are rotated, the first ones."""
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
    """yarn: frequencies of dimensions with fewer rotations than this over the original context are divided by `factor`.
    """
    attention_factor: float = 1.0
    """yarn: factor of the cosines and sines, so attention scores are scaled by its square."""
    score_mscale: float = 0.0
    """yarn, latent attention: attention scores are multiplied by (0.1 * score_mscale * ln(factor) + 1)^2."""
    truncate: bool = True
    """yarn: whether the borders of the ramp are rounded to whole dimensions."""


def read_rotary(config: Mapping[str, Any], *, fraction: float | None = None) -> Rotary:
    """Return the rotary embeddings in a config.json of transformers 4 or 5. Raises DataError for unsupported ones.

    `fraction` is the family's default of `partial_rotary_factor`; None: the family rotates all channels.
    """
    # transformers 5 keeps the rotary settings in rope_parameters, transformers 4 in fields of their own.
    rope = dict(mapping(config, "rope_parameters") or mapping(config, "rope_scaling"))
    if fraction is not None:
        given = rope.pop(_FRACTION, None)
        found = positive({_FRACTION: config.get(_FRACTION) if given is None else given}, _FRACTION, fraction)
        if found > 1:
            raise DataError(f"{_FRACTION} is {found}; it must be at most 1.")
        return replace(_read_rotary(config, rope), fraction=found)
    return _read_rotary(config, rope)


def _read_rotary(config: Mapping[str, Any], rope: Mapping[str, Any]) -> Rotary:
    theta = positive({"rope_theta": rope.get("rope_theta") or config.get("rope_theta")}, "rope_theta", 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _FIELDS:
        raise DataError(f"rope_type {kind} is not supported; supported are {', '.join(_FIELDS)}.")
    given = {name for name, value in rope.items() if value is not None}
    if unknown := sorted(given - _FIELDS[kind] - _NAMES):
        raise DataError(f"rope parameter {unknown[0]} is not supported with rope_type {kind}; remove it.")
    needed = {"original_max_position_embeddings"} if kind == "yarn" else set()
    for name in sorted((needed | _FIELDS[kind] & {"factor"}) - given):
        raise DataError(f"rope parameter {name} is missing; rope_type {kind} needs it.")
    if kind in ("default", "dynamic"):
        return Rotary(theta)
    factor = positive(rope, "factor", 1.0)
    original = positive(rope, "original_max_position_embeddings", 8192)
    if kind == "linear":
        return Rotary(theta, "linear", factor)
    if kind == "llama3":
        low, high = positive(rope, "low_freq_factor", 1.0), positive(rope, "high_freq_factor", 4.0)
        if not low < high:
            raise DataError(f"low_freq_factor {low} must be smaller than high_freq_factor {high}.")
        return Rotary(theta, "llama3", factor, original, low_factor=low, high_factor=high)
    if factor < 1:
        raise DataError(f"rope parameter factor {factor}: YaRN extends the context; use a factor of at least 1.")
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and positions > original * factor:
        # vLLM 0.30 has cosines and sines for this many positions and reads beyond them without an error.
        raise DataError(
            f"max_position_embeddings {positions} exceeds original_max_position_embeddings * factor = "
            f"{original * factor:g}; lower it or raise the factor."
        )
    return Rotary(
        theta,
        "yarn",
        factor,
        original,
        beta_fast=positive(rope, "beta_fast", 32.0),
        beta_slow=positive(rope, "beta_slow", 1.0),
        attention_factor=_attention_factor(rope, factor),
        truncate=rope.get("truncate") is None or flag(rope, "truncate"),
    )


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """Return YaRN's factor of cosines and sines, as transformers 5 and vLLM 0.30 derive it."""
    if rope.get("attention_factor") is not None:
        return positive(rope, "attention_factor", 1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        numerator, denominator = (
            _concentration(factor, positive(rope, name, 1.0)) for name in ("mscale", "mscale_all_dim")
        )
        return numerator / denominator
    return _concentration(factor, 1.0)


def _concentration(factor: float, mscale: float) -> float:
    """Return 0.1 * mscale * ln(factor) + 1 (YaRN, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0
