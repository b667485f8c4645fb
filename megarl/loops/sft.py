"""Supervised fine-tuning on the assistant's tokens of conversations: one update per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megarl.data.kinds.conversations import Conversation
from megarl.data.token_batch import TokenBatch
from megarl.loops.session import Session
from megarl.loops.start_comparison import compare_start
from megarl.loops.step import Step
from megarl.platform.spans import span
from megarl.preflight import collect_for, read_conversations
from megarl.rollout.step.rl_batch import assign_token_weights
from megarl.tracking.metric_rows import MetricRow

METRICS = (MetricRow("val/SET/loss", "nats", "loss of held-out conversations, mean over the assistant's tokens"),)

HeldOut = Mapping[str, Sequence[Conversation]]
"""Conversations of data.validation_conversations, by the name of their set."""


async def train(session: Session) -> None:
    """Train on the conversations for the remaining steps.

    Logs `train/loss` (nats per trained token), `train/entropy`, `train/tokens`, `train/grad_norm`.
    """
    recipe = session.recipe
    keep = collect_for(recipe, session.folder.path)
    conversations = read_conversations(recipe, session.tokenizer, recipe.data.train, session.dropped, collect=keep)
    held_out: HeldOut = {
        name: read_conversations(recipe, session.tokenizer, path, session.dropped)[: recipe.evaluation.max_problems]
        for name, path in recipe.data.validation_conversations.items()
    }
    order = session.origin.position.order(recipe, "data.train", len(conversations))
    # Each item drawn before has two events.
    session.rewind_draws(2 * order.start(session.folder.resumed_step))
    await _resume_or_evaluate(session, held_out)
    await compare_start(session, conversations)

    for number in session.steps.remaining:
        async with session.steps.step(number) as step:
            step.log({"data/epoch": order.epochs(number - 1)})
            with span("batch"):
                indices = order.batch(number - 1)
                batch = TokenBatch.from_samples([conversations[index] for index in indices])
                assign_token_weights(batch, recipe.algorithm)
            async with session.steps.updating(step):
                step.log_update(await session.models["policy"].update(batch))
            session.write_draws(number, order, indices)
            await session.checkpoints.begin(number)
            if recipe.evaluates_at(number):
                await _evaluate(session, step, held_out)


async def _resume_or_evaluate(session: Session, held_out: HeldOut) -> None:
    """Evaluate before the first step; after a resume, repeat an interrupted evaluation."""
    step = session.origin.unlogged or Step(session.folder.resumed_step, is_trained=True)
    if step.number and session.origin.unlogged is None:
        return
    async with session.steps.saving_on_stop(step):
        if session.origin.unlogged is not None:
            await _evaluate(session, step, held_out)
        else:
            # The engines start awake and have the trainer's initial weights, so sampling comes first.
            if session.recipe.evaluates_first:
                step.log(await session.evaluate(0))
            await session.reshard_schedule.sleep_engines()
            if session.recipe.evaluates_first:
                step.log(await _losses(session, held_out))
    session.steps.finish(step)


async def _evaluate(session: Session, step: Step, held_out: HeldOut) -> None:
    """Add a step's evaluation to its metrics. An interrupted evaluation adds nothing."""
    evaluated = await _losses(session, held_out)
    if any(source.validation for source in session.sources):
        # SFT reshards only for an evaluation that samples; training itself needs no engine.
        with session.tracker.phase("reshard"):
            evaluated |= await session.reshard_schedule.run(step.number)
        evaluated |= await session.evaluate(step.number)
        await session.reshard_schedule.sleep_engines()
    step.log(evaluated)


async def _losses(session: Session, held_out: HeldOut) -> dict[str, float]:
    """Return `val/SET/loss` of each set of held-out conversations, in nats per token of the assistant."""
    scalars: dict[str, float] = {}
    policy = session.models["policy"]
    with session.tracker.phase("evaluation"), policy.work.uncounted():
        for name, conversations in held_out.items():
            batch = TokenBatch.from_samples(conversations)
            logprobs = await policy.forward(batch)
            scalars[f"val/{name}/loss"] = -float(logprobs[batch.loss_mask].mean(dtype=np.float64))
    return scalars
