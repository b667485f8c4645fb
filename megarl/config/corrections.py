"""Whether a recipe corrects the difference of samples from an older policy, by importance weights or clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.config.effects import unmet
from megarl.config.formulas import formulas
from megarl.files.import_path import is_import_path

if TYPE_CHECKING:
    from megarl.config import Recipe


CORRECTING_LOSSES = ("dppo_tv", "dppo_kl", "vespo")
"""Policy losses that contain the ratio to the engine's log-probs, so that an importance weight would correct twice."""
_SMOOTH_LOSSES = ("vespo", "dro")
"""Policy losses without a clip that still bound stale samples: their weight fades with the ratio, or a penalty
grows.
"""


def lacks_correction(recipe: Recipe) -> bool:
    """Return whether the recipe trains on stale tokens without a correction and does not declare this."""
    if unmet(recipe, "rollout.max_staleness") is not None:
        return False
    # An explicit importance_sampling = none is intended, so it gives a warning, not an error.
    return is_uncorrected(recipe) and "importance_sampling" not in recipe.algorithm.model_fields_set


def is_uncorrected(recipe: Recipe) -> bool:
    return recipe.rollout.staleness_bound > 0 and nothing_corrects(recipe)


def nothing_corrects(recipe: Recipe) -> bool:
    """Return whether neither importance weights nor the loss correct for samples of older weights."""
    algorithm = recipe.algorithm
    # With the engine's log-probs as old log-probs, the loss itself corrects.
    is_bounded = "clip_low" in _settings_of_policy_loss(recipe) or algorithm.policy_loss in _SMOOTH_LOSSES
    corrects_in_loss = algorithm.old_logprobs == "rollout" and is_bounded
    return algorithm.importance_sampling is None and not corrects_in_loss


def _settings_of_policy_loss(recipe: Recipe) -> frozenset[str]:
    """A user's loss counts as having `clip_low`."""
    name = recipe.algorithm.policy_loss
    return frozenset({"clip_low"}) if is_import_path(name) else frozenset(formulas("algorithm.policy_loss")[name])
