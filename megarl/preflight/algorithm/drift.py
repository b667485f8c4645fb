"""Checks of losses that compare the policy with an older one, or need one advantage per sequence."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config import Recipe
from megarl.config.corrections import CORRECTING_LOSSES
from megarl.config.effects import unmet
from megarl.preflight.registry import checks

_SEQUENCE_LOSSES = ("vespo",)
"""Policy losses with one weight per sequence, which depends on the sign of the sequence's advantage."""

_SAME_POLICY = (
    "compares the policy with the one before the step's first update. With algorithm.old_logprobs = trainer and one "
    "update a step both are the same; set algorithm.old_logprobs=rollout, or train.updates_per_step above 1"
)


@checks("algorithm")
def check_settings_without_drift(recipe: Recipe) -> Iterator[str]:
    """Yield an error for each setting that compares the policy with an older one, if both are always the same."""
    algorithm, train = recipe.algorithm, recipe.train
    if not recipe.has_advantages or algorithm.old_logprobs == "rollout" or train.num_updates > 1:
        return
    # Waiting groups have log-probs of the older weights that sampled them.
    if recipe.rollout.carries_groups:
        return
    # Another check reports these losses if the recipe also has an importance weight. Its remedy is the same.
    corrects_twice = algorithm.importance_sampling is not None and algorithm.policy_loss in CORRECTING_LOSSES
    if algorithm.policy_loss in (*CORRECTING_LOSSES, "dro") and not corrects_twice:
        yield f"algorithm.policy_loss = {algorithm.policy_loss}: {_SAME_POLICY}"
    if algorithm.off_policy_limit is not None:
        yield f"algorithm.off_policy_limit = {algorithm.off_policy_limit}: {_SAME_POLICY}"
    if algorithm.skip_ratio is not None:
        yield f"algorithm.skip_ratio = {algorithm.skip_ratio}: {_SAME_POLICY}"
    # Where both policies are equal, the absolute log-ratio has slope zero.
    if algorithm.kl_cov_share is not None:
        yield (
            f"algorithm.kl_cov_share = {algorithm.kl_cov_share}: its penalty has no gradient in the first update of a "
            "step, and there is only one; set train.updates_per_step above 1, or use algorithm.clip_cov_share"
        )


@checks("algorithm")
def check_sequence_advantages(recipe: Recipe) -> Iterator[str]:
    """Yield an error for each setting that needs one advantage per sequence, if a sequence has several."""
    algorithm = recipe.algorithm
    if not recipe.has_advantages or (reason := _find_token_advantages(recipe)) is None:
        return
    needs_one_text = f"needs one advantage for all tokens of a sequence, but {reason}; or"
    if algorithm.policy_loss in _SEQUENCE_LOSSES:
        yield (
            f"algorithm.policy_loss = {algorithm.policy_loss}: {needs_one_text} set another algorithm.policy_loss, for "
            "example dppo_tv"
        )
    if algorithm.off_policy_limit is not None:
        yield f"algorithm.off_policy_limit = {algorithm.off_policy_limit}: {needs_one_text} leave it out"


def _find_token_advantages(recipe: Recipe) -> str | None:
    """Return the setting that gives tokens of a sequence different advantages, with its remedy; None: there is none."""
    algorithm = recipe.algorithm
    if recipe.loop == "distillation":
        return "loop = distillation gives each token its own; set loop=rl"
    if algorithm.advantage == "gae":
        return "algorithm.advantage = gae gives each token its own; set algorithm.advantage=grpo"
    if algorithm.turn_discount is not None and unmet(recipe, "algorithm.turn_discount") is None:
        return (
            f"algorithm.turn_discount = {algorithm.turn_discount} gives each turn its own; leave out "
            "algorithm.turn_discount"
        )
    if algorithm.state_weight and unmet(recipe, "algorithm.state_weight") is None:
        return (
            f"algorithm.state_weight = {algorithm.state_weight:g} gives each turn its own; leave out "
            "algorithm.state_weight"
        )
    if algorithm.kl_coefficient and algorithm.kl_placement in ("return", "advantage"):
        return (
            f"algorithm.kl_placement = {algorithm.kl_placement} gives each token its own; set "
            "algorithm.kl_placement=loss"
        )
    return None


@checks("algorithm")
def check_covariance_selection(recipe: Recipe) -> Iterator[str]:
    """Yield errors of clip_cov and kl_cov, which select tokens by the covariance of log-prob and advantage."""
    algorithm = recipe.algorithm
    if recipe.loop != "rl":
        return
    for name in ("clip_cov_share", "kl_cov_share"):
        # With old_logprobs = rollout, the trainer makes no pass before the update.
        if (share := getattr(algorithm, name)) is not None and algorithm.old_logprobs == "rollout":
            yield (
                f"algorithm.{name} = {share}: needs log-probs computed by the trainer before the update, but "
                "algorithm.old_logprobs = rollout skips this pass; set algorithm.old_logprobs=trainer"
            )
    low, high = algorithm.clip_cov_range
    if algorithm.clip_cov_share is not None and low >= high:
        yield f"algorithm.clip_cov_range = {[low, high]}: no covariance is between both; give the lower one first"
