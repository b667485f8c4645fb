"""Learning from pairs of answers: one update a step, held-out pairs by the same loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megarl.data.preferences import Pair
from megarl.data.sampler import DataOrder
from megarl.loops.batches import weigh
from megarl.loops.session import Session
from megarl.preflight import read_preferences
from megarl.tracking.metrics import values
from megarl.types import TrainingSequence


async def train(session: Session) -> None:
    """Metrics: `train/loss` (a pair), `preference/accuracy`, `/margin`, `/chosen`, `/rejected`, `train/grad_norm`."""
    recipe, tracker = session.recipe, session.tracker
    pairs = read_preferences(recipe, session.tokenizer, recipe.data.train)
    order = DataOrder(len(pairs), recipe.train.prompts_per_step, recipe.seed, recipe.data.shuffle)
    held_out = {
        name: read_preferences(recipe, session.tokenizer, path)[: recipe.evaluation.max_problems]
        for name, path in recipe.data.validation.items()
    }
    if not session.folder.resumed_step:
        tracker.log(0, await _evaluate(session, held_out))
    for step in session.steps:
        batch = await with_reference(session, [pairs[index] for index in order.batch(step - 1)])
        with tracker.phase("train"):
            weighed = weigh(batch, recipe.algorithm.model_copy(update={"aggregation": "sequence_mean_token_sum"}))
            scalars = values(await session.trainer.update(weighed))
        await session.checkpoints.begin(step)
        if session.evaluates_at(step):
            scalars |= await _evaluate(session, held_out)
        tracker.log(step, scalars)
        session.folder.set_status(step=step)
        await session.checkpoints.complete()


async def with_reference(session: Session, pairs: Sequence[Pair]) -> list[TrainingSequence]:
    """The pairs' sequences one after the other, with the reference's log-probs where the loss asks for them."""
    sequences = [sequence for pair in pairs for sequence in pair]
    if not session.recipe.has_reference:
        return sequences
    with session.tracker.phase("logprobs"):
        reference = await session.trainer.logprobs(sequences, of="reference")
    return [replace(s, reference_logprobs=r) for s, r in zip(sequences, reference, strict=True)]


async def _evaluate(session: Session, held_out: dict[str, list[Pair]]) -> dict[str, float]:
    """`val/SET/accuracy`: the share of held-out pairs whose chosen answer gained more, or has more, log-prob.

    Gained since the start where the loss has a reference; else a token's mean.
    """
    scalars: dict[str, float] = {}
    with session.tracker.phase("evaluation"):
        for name, pairs in held_out.items():
            sequences = await with_reference(session, pairs)
            policy = await session.trainer.logprobs(sequences)
            worth = [_worth(s, p) for s, p in zip(sequences, policy, strict=True)]
            # A draw, as every pair is before training, is half a win.
            won = np.sign(np.array(worth[::2]) - np.array(worth[1::2])) / 2 + 0.5
            scalars[f"val/{name}/accuracy"] = float(won.mean())
    return scalars


def _worth(sequence: TrainingSequence, logprobs: np.ndarray) -> float:
    if sequence.reference_logprobs is not None:
        return float((logprobs - sequence.reference_logprobs)[sequence.loss_mask].sum())
    return float(logprobs[sequence.loss_mask].mean())
