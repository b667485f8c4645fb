"""Loop of on-policy distillation: sample, score with the teachers, update the policy, reshard, repeat."""

from __future__ import annotations

from contextlib import aclosing

from megarl.loops.rl import judge_gap, resume_or_evaluate
from megarl.loops.session import Session
from megarl.platform.spans import span
from megarl.rollout.advantages import compute_importance_weights
from megarl.rollout.buffer import GroupBuffer
from megarl.rollout.evaluate import failure_metrics
from megarl.rollout.pool import AbandonedError
from megarl.rollout.rl_batch import RLBatch
from megarl.rollout.source import served_metrics
from megarl.rollout.state import RLState
from megarl.rollout.step_metrics import gap_metrics_before, is_gap_exceeded, step_metrics, update_metrics
from megarl.rollout.teachers import Teachers, compute_teacher_advantages


async def train(session: Session) -> None:
    """Run the loop: sample, score, update, save, reshard and evaluate. Rewards are measured but train nothing."""
    recipe, models, phase = session.recipe, session.models, session.tracker.phase
    algorithm, policy = recipe.algorithm, session.models["policy"]
    teachers = Teachers(recipe, models)
    state = RLState(algorithm)

    async with aclosing(GroupBuffer(recipe, session.sources, state)) as buffer:
        await resume_or_evaluate(session, buffer)
        buffer.on_sampled = session.sleep_engines
        for number in session.steps:
            async with session.step(number, state) as step:
                with phase("rollout"):
                    groups = await buffer.take(recipe.train.prompts_per_step, weight_version=number)
                step.log(buffer.metrics())
                step.log(failure_metrics(buffer.sampled, recipe.reward.max_failed_fraction, "reward/"))
                await session.sleep_engines()

                with phase("logprobs"):
                    groups = await buffer.add_old_logprobs(groups, policy.forward)
                    truncated = algorithm.mask_truncated
                    batch = RLBatch.from_groups(groups, mask_truncated=truncated, needs_rewards=False)
                    teachers.assign(batch)
                    if algorithm.old_logprobs == "rollout":
                        batch.start_from_rollout(number)
                    if recipe.has_advantages:
                        step.log(teachers.leave_out_unknown(batch))
                        teacher_logprobs = await teachers.score(batch)
                        step.log(compute_teacher_advantages(batch, teacher_logprobs, recipe.distillation))
                        step.log(compute_importance_weights(batch, algorithm))
                # Before the updates a stop loses only this step's samples; the state of the previous step is saved.
                if session.stop:
                    raise AbandonedError
                # Before the update, so that the records show the weights that sampled and trained these tokens.
                token_records = (
                    await session.samples.token_records(number, groups, batch) if recipe.has_advantages else ()
                )

                step.is_trained = True
                with phase("train"):
                    updates, gap = [], gap_metrics_before(batch, recipe.train)
                    for minibatch in () if gap else batch.minibatches(recipe, number):
                        if not recipe.has_advantages:
                            await teachers.teach(minibatch)
                        updates.append(await policy.update(minibatch))
                        if is_gap_exceeded(updates[-1]):
                            break
                with span("metrics"):
                    step.log(gap | update_metrics(updates))
                    judge_gap(session, step)
                    step.log(step_metrics(buffer.sampled, groups, recipe, weight_version=number))
                    step.log(served_metrics(session.sources))

                # Before the reshard: the engines sleep, so their memory is free for the save and the export.
                await session.checkpoints.begin(number, state.save)
                with phase("reshard"):
                    step.log(await session.reshards.run(number))
                step.log(session.pool.metrics())
                await session.samples.write_step(number, buffer.sampled, token_records)
                if recipe.evaluates_at(number):
                    step.log(await session.evaluate(number))
