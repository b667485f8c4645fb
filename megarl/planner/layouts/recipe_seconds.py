"""Predicted seconds of a training step in the recipe's own layout."""

from __future__ import annotations

import math

import numpy as np

from megarl.config import Recipe
from megarl.planner import sizes
from megarl.planner.layouts.candidates import EngineSizes, Placement
from megarl.planner.layouts.search import make_layout_search
from megarl.planner.savings import Recomputation
from megarl.planner.seconds.lengths import assumed_lengths
from megarl.planner.seconds.step import StepSeconds
from megarl.planner.seconds.trainer import Layouts
from megarl.types import ConfigError


def recipe_seconds(recipe: Recipe) -> StepSeconds | None:
    """Return the predicted seconds of a step, with the lengths assumed by `--search`.

    None: the cost model does not cover the recipe, or the kind of GPU is unknown. Raises DataError for an invalid
    config.json.
    """
    lengths = assumed_lengths(
        limit=recipe.rollout.sampling.max_new_tokens, max_prompt_tokens=recipe.data.max_prompt_tokens
    )
    try:
        costs = make_layout_search(recipe, lengths).costs
    except ConfigError:
        return None
    trainer, parallel = recipe.trainer, sizes.parallel_of(recipe)
    layouts = Layouts.of({axis: getattr(parallel, axis) for axis in ("tp", "pp", "cp", "vpp", "ep", "etp", "dp")})
    update = costs.update_seconds(
        layouts,
        [Recomputation(trainer.recompute, trainer.recompute_modules)],
        row_tokens=np.array([float(trainer.max_tokens_per_microbatch)]),
        keeps_logits=bool(trainer.keep_logits),
    )
    forward_tokens = trainer.max_tokens_per_forward or trainer.max_tokens_per_microbatch
    scoring_seconds = costs.scoring_seconds(layouts, row_tokens=np.array([float(forward_tokens)]))
    placement = Placement(ranks=recipe.separate_ranks, staleness=costs.staleness if recipe.separate_ranks else 0)
    engine = EngineSizes(parallel.rollout_tp, parallel.rollout_ep)
    # With gpu_memory_utilization, vLLM chooses the size of the cache. Assume that it holds all requests.
    sets_gpu_share = recipe.rollout.gpu_memory_utilization is not None
    cache_tokens = math.inf if sets_gpu_share else recipe.rollout.kv_cache_gib * 2**30 / costs.token_bytes(engine)
    offload_seconds = costs.model_loading_seconds(layouts) + costs.offload_seconds(
        costs.rank_state_bytes(layouts), trainer.offload
    )
    return StepSeconds(
        rollout=costs.rollout_seconds(placement, engine, cache_tokens).seconds,
        logprobs=float(scoring_seconds[0]),
        train=float(update.seconds[0]),
        reshard=costs.reshard_seconds(placement, engine),
        offload=float(offload_seconds[0]),
        other=costs.other_seconds,
        is_concurrent=placement.staleness > 0,
    )
