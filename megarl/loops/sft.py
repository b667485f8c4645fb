"""Supervised fine-tuning on the assistant's tokens of conversations: one update per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megarl.data.batch import TokenBatch
from megarl.data.sampler import DataOrder
from megarl.loops.session import Session
from megarl.preflight import read_conversations
from megarl.rollout.pool import AbandonedError
from megarl.rollout.weights import assign_token_weights
from megarl.tracking.metrics import values
from megarl.types import TrainingSequence


async def train(session: Session) -> None:
    """Metrics: `train/loss` (nats per trained token), `train/entropy`, `train/tokens`, `train/grad_norm`."""
    recipe, tracker = session.recipe, session.tracker
    conversations = read_conversations(recipe, session.tokenizer, recipe.data.train)
    held_out = {
        name: read_conversations(recipe, session.tokenizer, path)[: recipe.evaluation.max_problems]
        for name, path in recipe.data.validation_conversations.items()
    }
    order = DataOrder(len(conversations), recipe.train.prompts_per_step, recipe.seed, recipe.data.shuffle)
    if not session.folder.resumed_step:
        try:
            scalars = await session.evaluate(0)
        except AbandonedError:
            await session.stop_if_asked(0)
            raise
        await session.ranks.call("sleep_engine")
        tracker.log(0, scalars | await _losses(session, held_out))
    elif session.origin.unlogged is not None:
        await _evaluate_and_log(session, session.folder.resumed_step, session.origin.unlogged, held_out)
    for step in session.steps:
        batch = TokenBatch.from_sequences([conversations[index] for index in order.batch(step - 1)])
        assign_token_weights(batch, recipe.algorithm)
        with tracker.phase("train"):
            scalars = values(await session.models["policy"].update(batch))
        await session.checkpoints.begin(step)
        if session.evaluates_at(step):
            await _evaluate_and_log(session, step, scalars, held_out)
        else:
            tracker.log(step, scalars)
        session.folder.set_status(step=step)
        await session.checkpoints.complete()
        await session.stop_if_asked(step)


async def _evaluate_and_log(
    session: Session,
    step: int,
    scalars: Mapping[str, float],
    held_out: Mapping[str, Sequence[TrainingSequence]],
) -> None:
    """Log a step with its evaluation; if a signal interrupts that, both are left to the resumed run."""
    evaluated = await _losses(session, held_out)
    if session.validation:
        with session.tracker.phase("reshard"):
            evaluated |= await session.reshard(step)
        try:
            evaluated |= await session.evaluate(step)
        except AbandonedError:
            session.folder.set_status(step=step)
            await session.stop_if_asked(step, unlogged=scalars)
            raise
        await session.ranks.call("sleep_engine")
    session.tracker.log(step, {**scalars, **evaluated})


async def _losses(session: Session, held_out: Mapping[str, Sequence[TrainingSequence]]) -> dict[str, float]:
    """`val/SET/loss` of each set of held-out conversations: nats per token of the assistant."""
    scalars: dict[str, float] = {}
    with session.tracker.phase("evaluation"):
        for name, sequences in held_out.items():
            batch = TokenBatch.from_sequences(sequences)
            logprobs = await session.models["policy"].forward(batch)
            scalars[f"val/{name}/loss"] = -float(logprobs[batch.loss_mask].mean(dtype=np.float64))
    return scalars
