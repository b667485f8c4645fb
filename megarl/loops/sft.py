"""Supervised fine-tuning: the assistant's tokens of conversations, one update a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.data.sampler import DataOrder
from megarl.loops.batches import weigh
from megarl.loops.session import Session
from megarl.preflight import read_conversations
from megarl.tracking.metrics import values
from megarl.types import TrainingSequence


async def train(session: Session) -> None:
    """Metrics: `train/loss` (nats a trained token), `train/entropy`, `train/tokens`, `train/grad_norm`."""
    recipe, tracker = session.recipe, session.tracker
    conversations = read_conversations(recipe, session.tokenizer, recipe.data.train)
    held_out = {
        name: read_conversations(recipe, session.tokenizer, path)[: recipe.evaluation.max_problems]
        for name, path in recipe.data.validation_conversations.items()
    }
    order = DataOrder(len(conversations), recipe.train.prompts_per_step, recipe.seed, recipe.data.shuffle)
    scalars = {} if session.folder.resumed_step else await session.evaluate(0)
    await session.ranks.call("sleep_engine")
    if not session.folder.resumed_step:
        tracker.log(0, scalars | await _losses(session, held_out))
    for step in session.steps:
        batch = weigh([conversations[index] for index in order.batch(step - 1)], recipe.algorithm)
        with tracker.phase("train"):
            scalars = values(await session.trainer.update(batch))
        await session.checkpoints.begin(step)
        if session.evaluates_at(step):
            scalars |= await _losses(session, held_out)
            if session.validation:
                with tracker.phase("reshard"):
                    scalars |= await session.reshard(step)
                scalars |= await session.evaluate(step)
                await session.ranks.call("sleep_engine")
        tracker.log(step, scalars)
        session.folder.set_status(step=step)
        await session.checkpoints.complete()
        await session.stop_if_asked(step)


async def _losses(session: Session, held_out: Mapping[str, Sequence[TrainingSequence]]) -> dict[str, float]:
    """`val/SET/loss`: nats a token that the assistant says, of each set of held-out conversations."""
    scalars: dict[str, float] = {}
    with session.tracker.phase("evaluation"):
        for name, sequences in held_out.items():
            logprobs = await session.trainer.forward(sequences)
            said = [values[s.loss_mask] for s, values in zip(sequences, logprobs, strict=True)]
            scalars[f"val/{name}/loss"] = -float(sum(part.sum() for part in said) / sum(map(len, said)))
    return scalars
