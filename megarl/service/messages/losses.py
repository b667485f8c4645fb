"""Losses of the training service: the arrays that a client sends for each, and its settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from megarl.service.refusals import UserError


class Loss(NamedTuple):
    """A loss by the SDK's name. `inputs` are the arrays of each datum besides `target_tokens`.

    A client may set `settings`. `required` settings have no default.
    """

    inputs: tuple[str, ...]
    settings: tuple[str, ...] = ()
    required: tuple[str, ...] = ()


_THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")
_POLICY = ("logprobs", "advantages")

LOSSES = {
    "cross_entropy": Loss(("weights",)),
    "importance_sampling": Loss(_POLICY),
    "ppo": Loss(_POLICY, _THRESHOLDS),
    "cispo": Loss(_POLICY, _THRESHOLDS),
    "dro": Loss(_POLICY, ("beta",), ("beta",)),
    "gspo": Loss((*_POLICY, "sequence_ratio_mask"), _THRESHOLDS),
}
"""Losses by the SDK's names. `ranks.objectives` computes them."""


def read_settings(name: str, settings: Mapping[str, float | str]) -> dict[str, float]:
    """Return a client's settings of a loss as numbers. Raises UserError for an unknown loss or setting."""
    if name not in LOSSES:
        raise UserError(
            f"loss_fn = {name!r:.50}: this service does not have this loss; use one of {', '.join(LOSSES)}. For "
            "reinforcement learning, importance_sampling or cispo."
        )
    loss = LOSSES[name]
    numbers: dict[str, float] = {}
    for setting_name, value in settings.items():
        if setting_name not in loss.settings:
            setting_names = ", ".join(loss.settings) or "none"
            raise UserError(
                f"loss_fn_config.{setting_name:.50} = {value!r:.50}: {name} has no such setting; it has {setting_names}"
            )
        # The newer map of settings may hold texts, but no loss here takes one.
        if isinstance(value, str) or not math.isfinite(value):
            raise UserError(f"loss_fn_config.{setting_name} = {value!r:.50}: is not a finite number; give one")
        numbers[setting_name] = value
    for setting_name in loss.required:
        if setting_name not in numbers:
            raise UserError(f"loss_fn_config.{setting_name} is missing: {name} needs it; give a number")
    # `ranks.objectives._clip_bounds` has the same defaults. A single bound is checked against the other's default.
    low, high = numbers.get("clip_low_threshold", 0.8), numbers.get("clip_high_threshold", 1.2)
    if not 0 <= low <= 1 <= high:
        raise UserError(
            f"loss_fn_config = clip_low_threshold {low:g}, clip_high_threshold {high:g}: these bounds of the ratio do "
            "not contain 1; give 0 <= low <= 1 <= high"
        )
    if numbers.get("beta", 1.0) <= 0:
        raise UserError(f"loss_fn_config.beta = {numbers['beta']:g}: must be above 0")
    return numbers
