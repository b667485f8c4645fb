"""The loop of reinforcement learning: each step samples, scores, weighs, updates, saves and reshards.

`run` calls it once the ranks are ready. The phases are in `rollout`; `on_policy` has the sampling of all such loops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megarl.config import Recipe
from megarl.data.token_batch import TokenBatch
from megarl.datasets.reading import Dropped, read_conversations
from megarl.loops.models import move_reference, retain_experts
from megarl.loops.on_policy import open_rollout
from megarl.loops.saving.data_position import DataPosition
from megarl.loops.started_run import Run
from megarl.loops.step import StepSamples
from megarl.preflight import list_off_policy_warnings
from megarl.rollout.step.advantages import penalty_kl, weigh_batch
from megarl.rollout.step.scoring import forward_of, score_groups
from megarl.rollout.step.updates import PolicyUpdates, update_critic

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


async def train(run: Run) -> None:
    """Repeat: sample groups of completions, score, weigh, update, save, reshard and evaluate.

    A step trains the weights with its own number as version. The engines have the same version, because each step ends
    with a reshard. With rollout.sync_every they may have an earlier version. Separate engines sample during the update.
    """
    recipe, models, phase = run.recipe, run.models, run.tracker.phase
    policy = models["policy"]
    forward = forward_of(policy, recipe)
    conversations_at = conversations_of(recipe, run.data.tokenizer, run.data.dropped, run.origin.position)
    for warning in list_off_policy_warnings(recipe):
        run.tracker.notice(warning)

    async with open_rollout(run) as rollout:
        await rollout.resume()
        await run.evaluate_at_start(run.evaluate, rollout.state)
        for number in run.remaining_steps:
            async with run.step(number, run.evaluate, rollout.state) as step:
                groups = await rollout.sample(step)
                # Waiting groups of a synchronous step get their log-probs in the same batch.
                waiting = list(rollout.state.waiting) if rollout.buffer.policy.is_synchronous else []
                baselines = rollout.state.role_baselines
                samples = StepSamples(groups, waiting, rollout.state.kl_coefficient, dict(baselines))
                with phase("logprobs"):
                    groups = await rollout.buffer.add_old_logprobs(groups, forward)
                    groups, batch, scores = await score_groups(groups, models, recipe, weight_version=number)
                    step.log(scores)
                run.abandon_if_asked()
                with phase("advantages"):
                    # Before some tokens are excluded from the loss.
                    step.outcome.kl = penalty_kl(batch, recipe)
                    step.log(weigh_batch(batch, recipe, number, rollout.state.kl_coefficient, baselines))
                # Before the update, so that the records show the weights that sampled and trained these tokens.
                token_records = await run.samples.token_records(number, groups, batch)

                async with run.updating(step):
                    if "critic" in models:
                        step.log(await update_critic(batch, models["critic"], recipe, step.outcome))
                    updates = PolicyUpdates(batch, recipe, number, conversations_at(number))
                    for minibatch in updates:
                        updates.add_update(await policy.update(minibatch, samples.kl_coefficient))
                updates.add_to(step.outcome)
                step.log(updates.metrics())
                await run.watch.observers.observe_batch(step, samples, batch)
                rollout.log_samples(step, groups, updates.trained_tokens)
                step.log(rollout.state.adapt_kl(step.outcome.kl, num_samples=len(batch.rewards)))
                # Before the save, so that the checkpoint contains the moved reference.
                step.log(await move_reference(models, recipe, number))
                step.log(await retain_experts(models, recipe, rollout.state))

                # Before the reshard: colocated engines sleep, so their memory is free for the save and the export.
                await run.checkpoints.begin_due_saves(number, rollout.state.save)
                await rollout.reshard(step)
                await rollout.write_samples(step, groups, token_records)


def conversations_of(
    recipe: Recipe, tokenizer: Tokenizer, dropped: Dropped, position: DataPosition
) -> Callable[[int], TokenBatch | None]:
    """Return a function from a step's number to its conversations (algorithm.ptx_coefficient), if any.

    The policy learns them together with the step's minibatches. Too long records are counted in `dropped`. `position`
    is where the steps continue in the data.
    """
    if not recipe.data.ptx:
        return lambda number: None
    conversations = read_conversations(recipe, tokenizer, recipe.data.ptx, dropped)
    order = position.order(recipe, "data.ptx", len(conversations))
    return lambda number: TokenBatch.from_samples([conversations[index] for index in order.batch(number - 1)])
