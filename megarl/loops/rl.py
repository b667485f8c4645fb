"""Reinforcement learning: sample groups of completions, score them, update the policy, reshard; again."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megarl.algorithms.kl import adapted
from megarl.data.batch import TokenBatch
from megarl.data.sampler import DataOrder
from megarl.loops.session import Session, sampling_settings
from megarl.preflight import read_conversations, read_problems
from megarl.rollout.advantages import compute_advantages, compute_importance_weights
from megarl.rollout.batch import RLBatch
from megarl.rollout.buffer import Buffer, in_groups
from megarl.rollout.evaluate import failure_metrics
from megarl.rollout.metrics import reward_metrics, rollout_metrics, staleness_metrics, update_metrics
from megarl.rollout.pool import AbandonedError


async def train(session: Session) -> None:
    """One step: roll out -> log-probs, scores, values -> advantages -> update -> save -> reshard -> evaluate."""
    recipe, tracker, ranks = session.recipe, session.tracker, session.ranks
    problems = read_problems(recipe, session.tokenizer, recipe.data.train)
    sampling = sampling_settings(recipe.rollout.sampling)
    buffer = Buffer(recipe, problems, session.sampler, sampling)
    conversations = read_conversations(recipe, session.tokenizer, recipe.data.ptx) if recipe.data.ptx else []
    order = DataOrder(len(conversations), recipe.algorithm.ptx_conversations, recipe.seed, recipe.data.shuffle)
    if checkpoint := session.origin.checkpoint:
        if lacking := buffer.load(checkpoint):
            tracker.notice(
                f"{lacking} trajectories of {checkpoint} wait without the trainer's log-probs, since "
                "algorithm.old_logprobs was not trainer: their ratio starts from the engine's"
            )
        if recipe.trainer.router_replay:
            await ranks.call("load_experts", checkpoint, buffer.waiting_experts)
        resumed_step, unlogged = session.folder.resumed_step, session.origin.unlogged
        await session.reshard(resumed_step)
        if unlogged is not None:
            await _evaluate_and_log(session, resumed_step, unlogged, buffer)
    else:
        await _evaluate_and_log(session, 0, {}, buffer)
    for step in session.steps:
        # The version of the weights that sample for a step is its number: each step ends with a reshard.
        try:
            with tracker.phase("rollout"):
                kept, sampled, scalars = await buffer.step()
            scalars |= failure_metrics(sampled, recipe.reward.max_failed_fraction, "reward/")
        except AbandonedError:
            await session.stop_if_asked(step - 1, buffer.save)
            raise
        await ranks.call("sleep_engine")
        with tracker.phase("logprobs"):
            kept = await buffer.add_old_logprobs(kept, session.models["policy"].forward, weight_version=step)
            batch = RLBatch.from_groups(in_groups(kept), mask_truncated=recipe.algorithm.mask_truncated)
            if recipe.algorithm.old_logprobs == "rollout":
                batch.start_from_rollout(weight_version=step)
            if recipe.has_reference:
                batch.per_token["reference_logprobs"] = await session.models["reference"].forward(batch)
            if recipe.reward.model:
                kept, scores = await session.add_scores(kept, batch)
                scalars |= scores
            if recipe.has_critic:
                batch.per_token["values"] = await session.models["critic"].forward(batch)
        if session.stop:
            # Nothing has changed yet.
            buffer.forget_step()
            await session.stop_if_asked(step - 1, buffer.save)
        scalars |= compute_advantages(batch, recipe, buffer.kl_coefficient)
        if recipe.algorithm.importance_sampling:
            scalars |= compute_importance_weights(batch, recipe.algorithm)
        with tracker.phase("train"):
            if recipe.has_critic:
                scalars |= await session.update_critic(batch)
            beside = [conversations[index] for index in order.batch(step - 1)] if conversations else []
            learnt = TokenBatch.from_sequences(beside) if beside else None
            minibatches = batch.minibatches(recipe, step, learnt) if step > recipe.frozen_steps else []
            updates = [
                await session.models["policy"].update(minibatch, buffer.kl_coefficient) for minibatch in minibatches
            ]
        scalars |= (
            update_metrics(updates)
            | reward_metrics(sampled or kept, kept=kept if recipe.reward.model else None)
            | rollout_metrics(sampled or kept)
        )
        scalars |= staleness_metrics(kept, weight_version=step)
        scalars |= _adapt(buffer, scalars, num_samples=len(kept))
        if recipe.trainer.router_replay:
            scalars["rollout/routed_experts_bytes"] = float(
                sum(await ranks.call("retain_experts", buffer.waiting_experts))
            )
        await session.checkpoints.begin(step, buffer.save)
        with tracker.phase("reshard"):
            scalars |= await session.reshard(step)
        if step % recipe.samples_every_steps == 0:
            written = kept if recipe.reward.model else sampled
            tracker.samples(step, [trajectory.record() for trajectory in written])
        if session.evaluates_at(step):
            await _evaluate_and_log(session, step, scalars, buffer)
        else:
            tracker.log(step, scalars)
        session.folder.set_status(step=step)
        await session.checkpoints.complete()
        await session.stop_if_asked(step, buffer.save)


async def _evaluate_and_log(session: Session, step: int, scalars: Mapping[str, float], buffer: Buffer) -> None:
    """Log a step with its evaluation; where a signal cuts that short, both are left to the resumed run."""
    try:
        evaluated = await session.evaluate(step)
    except AbandonedError:
        session.folder.set_status(step=step)
        await session.stop_if_asked(step, buffer.save, unlogged=scalars)
        raise
    session.tracker.log(step, {**scalars, **evaluated})


def _adapt(buffer: Buffer, scalars: dict[str, float], *, num_samples: int) -> dict[str, float]:
    """Bring the KL's weight nearer to what holds its target: `kl/coefficient`, as it was in this step."""
    algorithm = buffer.recipe.algorithm
    if algorithm.kl_target is None or "kl/reference" not in scalars:
        return {}
    before = buffer.kl_coefficient
    if not math.isfinite(scalars["kl/reference"]):
        return {"kl/coefficient": before}
    buffer.kl_coefficient = adapted(
        before,
        scalars["kl/reference"],
        target=algorithm.kl_target,
        horizon=algorithm.kl_horizon,
        num_samples=num_samples,
    )
    return {"kl/coefficient": before}
