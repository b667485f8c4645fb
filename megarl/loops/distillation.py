"""The loop of on-policy distillation: the policy samples, and learns from its teachers' distributions or log-probs."""

from __future__ import annotations

from megarl.loops.models import move_reference
from megarl.loops.on_policy import open_rollout
from megarl.loops.started_run import Run
from megarl.rollout.step.advantages import compute_importance_weights
from megarl.rollout.step.rl_batch import RLBatch
from megarl.rollout.step.teacher_prompts import TeacherPrompts
from megarl.rollout.step.teachers import Teachers, add_reward_advantages, compute_teacher_advantages
from megarl.rollout.step.updates import PolicyUpdates


async def train(run: Run) -> None:
    """Repeat: sample, score with the teachers, update the policy, save, reshard and evaluate.

    Rewards are measured, and train the policy only with distillation.use_task_rewards.
    """
    recipe, models, phase = run.recipe, run.models, run.tracker.phase
    algorithm, policy, has_advantages = recipe.algorithm, models["policy"], recipe.has_advantages
    teachers = Teachers(recipe, models, _make_teacher_prompts(run))

    async with open_rollout(run) as rollout:
        await rollout.resume()
        await run.evaluate_at_start(run.evaluate, rollout.state)
        for number in run.remaining_steps:
            async with run.step(number, run.evaluate, rollout.state) as step:
                groups = await rollout.sample(step)
                with phase("logprobs"):
                    groups = await rollout.buffer.add_old_logprobs(groups, policy.forward)
                    batch = RLBatch.from_groups(
                        groups,
                        mask_truncated=algorithm.mask_truncated,
                        needs_rewards=recipe.trains_rewards,
                        replays_routes=recipe.trainer.router_replay,
                    )
                    teachers.assign_teachers(batch)
                    step.log(teachers.write_prompts(batch, groups))
                    if algorithm.old_logprobs == "rollout":
                        batch.use_engine_logprobs_as_old(number)
                    if has_advantages:
                        step.log(teachers.mask_unknown_tokens(batch))
                        teacher_logprobs = await teachers.score(batch)
                        step.log(compute_teacher_advantages(batch, teacher_logprobs, recipe.distillation))
                        if recipe.trains_rewards:
                            step.log(add_reward_advantages(batch, recipe))
                        step.log(compute_importance_weights(batch, algorithm))
                run.abandon_if_asked()
                # Before the update, so that the records show the weights that sampled and trained these tokens.
                token_records = await run.samples.token_records(number, groups, batch) if has_advantages else []

                async with run.updating(step):
                    updates = PolicyUpdates(batch, recipe, number)
                    for minibatch in updates:
                        if not has_advantages:
                            await teachers.store_targets(minibatch)
                        updates.add_update(await policy.update(minibatch))
                updates.add_to(step.outcome)
                step.log(updates.metrics())
                rollout.log_samples(step, groups, updates.trained_tokens)
                # Before the save, so that the checkpoint contains the moved reference.
                step.log(await move_reference(models, recipe, number))

                # Before the reshard, while the engines sleep: their memory is free for the save and the export.
                await run.checkpoints.begin_due_saves(number, rollout.state.save)
                await rollout.reshard(step)
                await rollout.write_samples(step, groups, token_records)


def _make_teacher_prompts(run: Run) -> dict[str, TeacherPrompts]:
    """Return the writers of the teachers' prompts by source. A source without distillation.teacher_prompt has none."""
    prompts = {}
    for source in run.data.sources:
        config = source.recipe.distillation
        if config.teacher_prompt is not None:
            prompts[source.name] = TeacherPrompts(config.teacher_prompt, config.context, source.sampler.dialogue)
    return prompts
