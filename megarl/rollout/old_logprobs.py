"""The trainer's log-probs and entropies of sampled tokens, computed with the weights before a step's update."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from megarl.config import Recipe
from megarl.data.token_batch import TokenBatch
from megarl.rollout.rl_batch import RLBatch
from megarl.rollout.state import flatten
from megarl.types import Group, Segment, Trajectory

Forward = Callable[[TokenBatch], Awaitable[np.ndarray]]
"""Async function computing the trainer's log-probs of a batch: float32 [tokens], or [2, tokens] with entropies."""


async def complete_logprobs(
    groups: Sequence[Group], waiting: Sequence[Group], recipe: Recipe, forward: Forward
) -> tuple[list[Group], list[Group]]:
    """Add the trainer's `old_logprobs` to a step's groups, and to `waiting` groups of a later step, where needed.

    New trajectories trained in a single update need none: the update's own forward pass gives them. Waiting ones always
    need them. With algorithm.entropy_top_share all get `entropies` too. `forward` is called at most once. Returns both
    lists.
    """
    if recipe.algorithm.old_logprobs == "rollout":
        return list(groups), list(waiting)
    everything = flatten([*groups, *waiting])
    # Without that need, only waiting trajectories get log-probs: the ones after the step's own.
    first = 0 if _needs_logprobs(recipe) else sum(len(group) for group in groups)
    needs_entropies = recipe.algorithm.entropy_top_share is not None
    lacking = [number >= first and lacks_logprobs(one) for number, one in enumerate(everything)]
    wanting = [needs_entropies and _lacks_entropies(one) for one in everything]
    if chosen := [place for place, wanted in enumerate(zip(lacking, wanting, strict=True)) if any(wanted)]:
        # One batch for all, because a forward pass is a call to every rank.
        batch = RLBatch.from_groups([[everything[place] for place in chosen]])
        found = [iter(np.split(values, batch.cu_seqlens[1:-1])) for values in np.atleast_2d(await forward(batch))]
        for place in chosen:
            logprobs, *entropies = (list(islice(values, len(everything[place].segments))) for values in found)
            if lacking[place]:
                everything[place] = with_logprobs(everything[place], logprobs)
            if wanting[place]:
                everything[place] = _with_entropies(everything[place], *entropies)
    # `everything` was flat; restore the groups in the same order.
    completed = iter(everything)
    taken, waited = ([[next(completed) for _ in group] for group in some] for some in (groups, waiting))
    return taken, waited


def _needs_logprobs(recipe: Recipe) -> bool:
    """Return whether the recipe needs the trainer's log-probs of all trained tokens before the first update."""
    if recipe.loop == "distillation":
        return recipe.has_advantages
    algorithm = recipe.algorithm
    # A KL outside the loss is part of the advantages, computed before the first update.
    is_kl_before = algorithm.kl_coefficient > 0 and algorithm.kl_placement != "loss"
    return recipe.train.num_updates > 1 or algorithm.importance_sampling is not None or is_kl_before


def lacks_logprobs(trajectory: Trajectory) -> bool:
    """Return whether a segment of the trajectory has no log-probs of the trainer."""
    return any(segment.old_logprobs is None for segment in trajectory.segments)


def _lacks_entropies(trajectory: Trajectory) -> bool:
    return any(segment.entropies is None for segment in trajectory.segments)


def with_logprobs(trajectory: Trajectory, logprobs: Sequence[np.ndarray]) -> Trajectory:
    """Return the trajectory with `logprobs`, one array [tokens] per segment, as `old_logprobs`; zero on tokens not
    sampled.
    """
    pairs = zip(trajectory.segments, logprobs, strict=True)
    return replace(trajectory, segments=tuple(replace(s, old_logprobs=_sampled_only(s, own)) for s, own in pairs))


def _with_entropies(trajectory: Trajectory, entropies: Sequence[np.ndarray]) -> Trajectory:
    pairs = zip(trajectory.segments, entropies, strict=True)
    return replace(trajectory, segments=tuple(replace(s, entropies=_sampled_only(s, own)) for s, own in pairs))


def _sampled_only(segment: Segment, values: np.ndarray) -> np.ndarray:
    return np.where(segment.loss_mask, values, np.float32(0))
