"""Checks of differences between the sampling and the trained distribution: sampling settings, stale tokens,
rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from megarl.config import Recipe
from megarl.config.corrections import is_uncorrected, lacks_correction, nothing_corrects
from megarl.config.effects import unmet
from megarl.preflight.registry import checks


@checks("rollout")
def check_sampling(recipe: Recipe) -> Iterator[str]:
    """Yield errors of sampling settings that the trainer cannot reproduce in its log-probs.

    The trainer reproduces temperature, top-p, top-k and min-p.
    """
    vllm = recipe.rollout.vllm
    if recipe.has_engine and recipe.evaluation.sampling.min_p > 0 and vllm.get("speculative_config"):
        yield (
            f"rollout.vllm.speculative_config = {vllm['speculative_config']}: vLLM has no min-p with speculative "
            "decoding; leave out this field or evaluation.sampling.min_p"
        )
    if not recipe.is_on_policy:
        return
    if vllm.get("logits_processors"):
        yield (
            f"rollout.vllm.logits_processors = {vllm['logits_processors']}: the engine would sample from another "
            "distribution than the one that is trained; leave it out"
        )
    if recipe.rollout.sampling.is_truncated and vllm.get("speculative_config"):
        yield (
            f"rollout.vllm.speculative_config = {vllm['speculative_config']}: vLLM does not record the tokens that "
            "rollout.sampling.top_p, top_k or min_p kept under speculative decoding; leave it out, or all of these"
        )
    # Log-probs of trainer and engine are compared, so both must belong to the sampling distribution.
    if vllm.get("logprobs_mode", "processed_logprobs") != "processed_logprobs":
        yield (
            f"rollout.vllm.logprobs_mode = {vllm['logprobs_mode']}: training needs log-probs of the sampling "
            "distribution (processed_logprobs); leave it out"
        )


@checks("rollout")
def check_stragglers(recipe: Recipe) -> Iterator[str]:
    """Yield errors of rollout.stragglers: what happens to incomplete groups once a step has enough complete ones."""
    rollout, algorithm = recipe.rollout, recipe.algorithm
    if recipe.loop != "rl" or rollout.stragglers == "wait":
        return
    setting = f"rollout.stragglers = {rollout.stragglers}"
    if ceil(algorithm.oversampling * recipe.train.prompts_per_step) == recipe.train.prompts_per_step:
        yield (
            f"{setting}: a step samples only as many groups as it trains, so none is left over; set "
            "algorithm.oversampling=1.5, for example"
        )
    # Aborted groups are dropped, so they never become stale.
    if rollout.stragglers == "abort":
        return
    if rollout.staleness_bound == 0:
        yield (
            "rollout.max_staleness = 0: paused groups are trained one weight version later; set 1, or "
            "rollout.stragglers=wait"
        )
    if algorithm.oversampling > 2:
        yield (
            f"algorithm.oversampling = {algorithm.oversampling}: with {setting} a step would leave more groups to the "
            "next step than it trains, and their age would grow without limit; use at most 2"
        )


@checks("rollout")
def check_staleness(recipe: Recipe) -> Iterator[str]:
    """Yield errors in the settings for training on stale tokens, which older weights sampled."""
    rollout = recipe.rollout
    if unmet(recipe, "rollout.max_staleness") is not None:
        return
    bound, age_before_reshard = rollout.staleness_bound, rollout.sync_every - 1
    if unmet(recipe, "rollout.sync_every") is None and bound < age_before_reshard:
        yield (
            f"rollout.max_staleness = {bound}: with rollout.sync_every = {rollout.sync_every}, samples are up to "
            f"{age_before_reshard} "
            f"weight versions old before the next reshard; set it to at least {age_before_reshard}, or to "
            f"{age_before_reshard + 1} if engines are to sample ahead"
        )
    if lacks_correction(recipe):
        setting = "rollout.placement = separate" if rollout.is_paced else f"rollout.stragglers = {rollout.stragglers}"
        yield (
            f"{setting}: tokens sampled by older weights are trained (rollout.max_staleness = {bound}), and nothing "
            "corrects for it; set algorithm.importance_sampling=tis, or algorithm.old_logprobs=rollout with a "
            "clipping policy loss; or algorithm.importance_sampling=none if this is intended"
        )


def list_off_policy_warnings(recipe: Recipe) -> Iterator[str]:
    """Yield a warning for each allowed difference between the sampling policy and the trained policy."""
    yield from warn_of_uncorrected_staleness(recipe)
    yield from warn_of_uncorrected_fp8(recipe)
    yield from warn_of_kept_kv(recipe)


def warn_of_uncorrected_staleness(recipe: Recipe) -> Iterator[str]:
    """Yield a warning if stale tokens are trained with algorithm.importance_sampling = none."""
    if unmet(recipe, "rollout.max_staleness") is None and is_uncorrected(recipe):
        yield (
            "algorithm.importance_sampling = none: tokens up to rollout.max_staleness = "
            f"{recipe.rollout.staleness_bound} versions old are trained as if the newest weights had sampled them; "
            "staleness/ reports their age"
        )


def warn_of_uncorrected_fp8(recipe: Recipe) -> Iterator[str]:
    """Yield a warning if engines sample in FP8, and nothing corrects the difference from the trainer."""
    defaults = {"quantization": "none", "kv_cache_dtype": "auto"}
    values = {name: getattr(recipe.rollout, name) for name in defaults}
    settings = [f"rollout.{name} = {value}" for name, value in values.items() if value != defaults[name]]
    if recipe.has_engine and settings and nothing_corrects(recipe):
        yield (
            f"{', '.join(settings)}: the engines' distribution differs from the trainer's, and nothing corrects for "
            "it; set algorithm.importance_sampling=tis; the metrics logprob_gap/ show the difference"
        )


def warn_of_kept_kv(recipe: Recipe) -> Iterator[str]:
    """Yield a warning if rollout.recompute_kv is false: log-probs then mix several weight versions."""
    if unmet(recipe, "rollout.recompute_kv") is None and not recipe.rollout.recompute_kv:
        yield (
            "rollout.recompute_kv = false: requests interrupted by a reshard continue with the old keys and values; "
            "the metrics logprob_gap/ include this difference, so they no longer measure rounding alone"
        )
