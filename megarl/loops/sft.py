"""Supervised fine-tuning: the assistant's tokens of conversations, one update a step."""

from __future__ import annotations

from megarl.data.sampler import DataOrder
from megarl.loops.batches import weigh
from megarl.loops.session import Session
from megarl.preflight import read_conversations
from megarl.tracking.metrics import values


async def train(session: Session) -> None:
    """Metrics: `train/loss` (nats a trained token), `train/entropy`, `train/tokens`, `train/grad_norm`."""
    recipe, tracker = session.recipe, session.tracker
    conversations = read_conversations(recipe, session.tokenizer)
    order = DataOrder(len(conversations), recipe.train.prompts_per_step, recipe.seed, recipe.data.shuffle)
    if not session.folder.resumed_step:
        tracker.log(0, await session.evaluate(0))
    await session.ranks.call("sleep_engine")
    for step in session.steps:
        batch = weigh([conversations[index] for index in order.batch(step - 1)], recipe.algorithm)
        with tracker.phase("train"):
            scalars = values(await session.trainer.update(batch))
        await session.checkpoints.begin(step)
        if session.evaluates_at(step):
            with tracker.phase("reshard"):
                scalars |= await session.reshard(step)
            scalars |= await session.evaluate(step)
            await session.ranks.call("sleep_engine")
        tracker.log(step, scalars)
        session.folder.set_status(step=step)
        await session.checkpoints.complete()
