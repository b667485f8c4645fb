"""Reinforcement learning: sample groups of completions, score them, update the policy, reshard, repeat."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing

from megarl.data.sampler import DataOrder
from megarl.data.token_batch import TokenBatch
from megarl.loops.performance import Balance
from megarl.loops.session import Session, Step
from megarl.platform.spans import span
from megarl.preflight import kept_kv, read_conversations, uncorrected, uncorrected_fp8
from megarl.rollout.advantages import compute_advantages, compute_importance_weights, keep_highest_entropies
from megarl.rollout.auxiliary_models import add_model_scores, score_tokens, update_critic
from megarl.rollout.buffer import GroupBuffer
from megarl.rollout.buffer_policy import BufferPolicy
from megarl.rollout.evaluate import failure_metrics
from megarl.rollout.pool import AbandonedError
from megarl.rollout.rl_batch import RLBatch
from megarl.rollout.source import served_metrics
from megarl.rollout.state import RLState, flatten
from megarl.rollout.step_metrics import (
    gap_exceeded_message,
    gap_metrics_before,
    is_gap_exceeded,
    metrics_by_version,
    step_metrics,
    update_metrics,
)
from megarl.types import MegarlError


async def train(session: Session) -> None:
    """Repeat sample, score, advantages, update, save, reshard and evaluate.

    A step trains the weights with its own number as version. The engines have the same version, because each step ends
    with a reshard. With rollout.sync_every they have an earlier one. Separate engines sample during the update.
    """
    recipe, models, phase = session.recipe, session.models, session.tracker.phase
    algorithm, policy = recipe.algorithm, session.models["policy"]
    state = RLState(algorithm)
    conversations_of = _conversations(session)
    forward = policy.forward if algorithm.entropy_top_share is None else policy.forward_with_entropies
    balance = _balance(session)
    for warning in (*uncorrected(recipe), *uncorrected_fp8(recipe), *kept_kv(recipe)):
        session.tracker.notice(warning)

    async with aclosing(GroupBuffer(recipe, session.sources, state, BufferPolicy.from_recipe(recipe))) as buffer:
        await resume_or_evaluate(session, buffer)
        # Free the engines' memory as soon as sampling ends, while rewards are still awaited.
        buffer.on_sampled = session.sleep_engines
        # Resuming reshards first, so the engines begin with the version of the first step.
        engine_version = session.steps.start
        for number in session.steps:
            async with session.step(number, state) as step:
                with phase("rollout"):
                    groups = await buffer.take(recipe.train.prompts_per_step, number, engine_version)
                step.log(buffer.metrics())
                step.log(failure_metrics(buffer.sampled, recipe.reward.max_failed_fraction, "reward/"))
                await session.sleep_engines()

                with phase("logprobs"):
                    groups = await buffer.add_old_logprobs(groups, forward)
                    batch = RLBatch.from_groups(groups, mask_truncated=algorithm.mask_truncated)
                    await score_tokens(batch, models, recipe, weight_version=number)
                    if "reward_model" in models:
                        groups, scored = await add_model_scores(groups, batch, models["reward_model"], recipe.reward)
                        step.log(scored)
                # Before the updates a stop loses only this step's samples; the state of the previous step is saved.
                if session.stop:
                    raise AbandonedError
                with phase("advantages"):
                    step.log(compute_advantages(batch, recipe, state.kl_coefficient))
                    step.log(compute_importance_weights(batch, algorithm))
                    step.log(keep_highest_entropies(batch, algorithm))
                    if not buffer.policy.is_synchronous:
                        step.log(metrics_by_version(batch, number, is_trainers=algorithm.old_logprobs == "trainer"))
                        batch.forget_stale_logprobs(weight_version=number)

                # Before the update, so that the records show the weights that sampled and trained these tokens.
                token_records = await session.samples.token_records(number, groups, batch)

                # From here on a stop signal must save this step and not the previous one: the weights change.
                step.is_trained = True
                with phase("train"):
                    if "critic" in models:
                        step.log(await update_critic(batch, models["critic"], recipe))
                    # A mismatch beyond the limit before the first update means no update at all in this step.
                    updates, gap = [], gap_metrics_before(batch, recipe.train)
                    for minibatch in () if gap else batch.minibatches(recipe, number, conversations_of(number)):
                        updates.append(await policy.update(minibatch, state.kl_coefficient))
                        # The rest of the step's minibatches would be trained with wrong ratios.
                        if is_gap_exceeded(updates[-1]):
                            break
                with span("metrics"):
                    step.log(gap | update_metrics(updates))
                    judge_gap(session, step)
                    step.log(step_metrics(buffer.sampled, groups, recipe, weight_version=number))
                    step.log(served_metrics(session.sources))
                    step.log(state.adapt_kl(step.metrics, num_samples=len(batch.rewards)))
                # Before the save: the checkpoint contains the moved reference.
                step.log(await session.move_reference(number))
                step.log(await session.retain_experts(state))

                # Before the reshard: colocated engines sleep, so their memory is free for the save and the export.
                await session.checkpoints.begin(number, state.save)
                if recipe.reshards_at(number):
                    with phase("reshard"):
                        step.log(await session.reshards.begin(number))
                    engine_version = number + 1
                step.log(session.pool.metrics())
                if balance is not None:
                    # After the pool's metrics, because it reads `time/engines_idle` from them.
                    step.log(balance.observe_step(session.tracker.seconds, step.metrics))
                # A reward model adds scores to `groups` only, so the sampled trajectories lack them.
                shown = flatten(groups) if "reward_model" in models else buffer.sampled
                await session.samples.write_step(number, shown, token_records)
                if recipe.evaluates_at(number):
                    step.log(await session.evaluate(number))


def judge_gap(session: Session, step: Step) -> None:
    """Act on a step with too large a log-prob mismatch between trainer and engine (train.on_logprob_gap).

    The run either ends after the step or continues with one notice.
    """
    if not step.metrics.get("train/gap_exceeded"):
        return
    train = session.recipe.train
    message = gap_exceeded_message(train, step.number, step.metrics["logprob_gap/mean"])
    if train.on_logprob_gap == "stop":
        step.fault = MegarlError(
            f"{message}. The state after the step is saved; go on with: megarl train {session.folder.path} --resume"
        )
    else:
        session.tracker.notice_once("gap", f"{message} (train/gap_exceeded counts such steps)")


async def resume_or_evaluate(session: Session, buffer: GroupBuffer) -> None:
    """Continue from the checkpoint and repeat an interrupted evaluation, or evaluate before the first step."""
    step = Step(session.folder.resumed_step, is_trained=True)
    if checkpoint := session.origin.checkpoint:
        if lacking := buffer.load(checkpoint):
            session.tracker.notice(
                f"{lacking} trajectories of {checkpoint} have no log-probs of the trainer, because "
                "algorithm.old_logprobs was not trainer: their ratio starts from the engine's"
            )
        if session.recipe.trainer.router_replay:
            await session.ranks.trainers.call("load_experts", checkpoint, buffer.state.waiting_experts)
        # The engines hold the initial weights, not the checkpoint's.
        await session.reshards.run(step.number)
        if session.origin.unlogged is None:
            return
        # A signal interrupted the evaluation of this step: its other metrics were saved unlogged.
        step.log(session.origin.unlogged)
    elif not session.evaluates_first:
        return
    async with session.leaving_in_order(step, buffer.state):
        step.log(await session.evaluate(step.number))
    session.finish(step)


def _balance(session: Session) -> Balance | None:
    """Return the bottleneck detector, None for colocated engines."""
    recipe = session.recipe
    if recipe.rollout.placement == "colocated":
        return None
    takes_turns = recipe.rollout.staleness_bound == 0
    return Balance(recipe.trainer_ranks, recipe.separate_ranks, session.tracker.notice, takes_turns=takes_turns)


def _conversations(session: Session) -> Callable[[int], TokenBatch | None]:
    """Return a function from a step's number to its conversations (algorithm.ptx_coefficient), if any.

    The policy learns these conversations together with the step's minibatches.
    """
    recipe = session.recipe
    if not recipe.data.ptx:
        return lambda number: None
    conversations = read_conversations(recipe, session.tokenizer, recipe.data.ptx, session.dropped)
    order = DataOrder(len(conversations), recipe.algorithm.ptx_conversations, recipe.seed, recipe.data.shuffle)
    return lambda number: TokenBatch.from_sequences([conversations[index] for index in order.batch(number - 1)])
