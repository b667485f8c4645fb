"""Learning from preferred or judged answers, a policy or a reward model: one update a step, held-out answers beside."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megarl.data.preferences import Answers
from megarl.data.sampler import DataOrder
from megarl.loops.session import Session
from megarl.preflight import read_preferences
from megarl.rollout.batches import assign_token_weights
from megarl.tracking.metrics import values
from megarl.types import TrainingSequence


async def train(session: Session) -> None:
    """Metrics: `train/loss` (a pair, an answer), those of `preference_objective`; kto: `kl/reference` of an answer."""
    recipe, tracker = session.recipe, session.tracker
    answers = read_preferences(recipe, session.tokenizer, recipe.data.train)
    order = DataOrder(len(answers), recipe.train.prompts_per_step, recipe.seed, recipe.data.shuffle)
    held_out = {
        name: read_preferences(recipe, session.tokenizer, path)[: recipe.evaluation.max_problems]
        for name, path in recipe.data.validation.items()
    }
    if not session.folder.resumed_step:
        tracker.log(0, await _evaluate(session, held_out))
    for step in session.steps:
        batch = await with_reference(session, [answers[index] for index in order.batch(step - 1)])
        is_judged = recipe.sequences_per_example == 1
        kto_kl = await _divergence(session, batch) if is_judged else None
        with tracker.phase("train"):
            weighed = assign_token_weights(
                batch, recipe.algorithm.model_copy(update={"aggregation": "sequence_mean_token_sum"})
            )
            scalars = values(await session.trainer.update(weighed, kto_kl=kto_kl))
            if kto_kl is not None:
                scalars["kl/reference"] = kto_kl
        await session.checkpoints.begin(step)
        if session.evaluates_at(step):
            scalars |= await _evaluate(session, held_out)
        tracker.log(step, scalars)
        session.folder.set_status(step=step)
        await session.checkpoints.complete()
        await session.stop_if_asked(step)


async def with_reference(session: Session, answers: Sequence[Answers]) -> list[TrainingSequence]:
    """The sequences one after the other, with the reference's log-probs where the loss asks for them."""
    sequences = [sequence for together in answers for sequence in together]
    if not session.recipe.has_reference:
        return sequences
    with session.tracker.phase("logprobs"):
        return await session.add("reference_logprobs", sequences, model="reference")


async def _divergence(session: Session, batch: Sequence[TrainingSequence]) -> float:
    """The policy's KL from the reference, at least zero: the mean log-ratio of prompts and neighbours' answers."""
    longest = max(map(len, batch))
    mismatched = []
    for one, other in zip(batch, [*batch[1:], batch[0]], strict=True):
        prompt, answer = one.token_ids[: one.loss_mask.argmax()], other.token_ids[other.loss_mask]
        tokens = np.concatenate([prompt, answer])[:longest]
        mismatched.append(TrainingSequence(tokens, np.arange(len(tokens)) >= len(prompt)))
    with_held = await with_reference(session, [(sequence,) for sequence in mismatched])
    with session.tracker.phase("logprobs"):
        policy = await session.trainer.forward(with_held)
    return max(0.0, float(np.mean([_worth(s, p) for s, p in zip(with_held, policy, strict=True)])))


async def _evaluate(session: Session, held_out: dict[str, list[Answers]]) -> dict[str, float]:
    """`val/SET/accuracy`: the share of held-out pairs whose chosen answer gained more, or has more, log-prob.

    Gained since the start where the loss has a reference; else a token's mean. Of judged answers: the chance that a
    good one gained more than a bad one. Of a reward model: the pairs whose chosen answer has the higher score.
    """
    scalars: dict[str, float] = {}
    with session.tracker.phase("evaluation"):
        for name, answers in held_out.items():
            sequences = await with_reference(session, answers)
            policy = await session.trainer.forward(sequences)
            worth = np.array([_worth(s, p) for s, p in zip(sequences, policy, strict=True)])
            good, bad = worth[::2], worth[1::2]
            if session.recipe.sequences_per_example == 1:
                is_good = np.array([bool(s.desirable is not None and s.desirable.max() > 0) for s in sequences])
                good, bad = worth[is_good, None], worth[None, ~is_good]
            if not good.size or not bad.size:
                continue
            # A draw, as every pair is before training, is half a win.
            scalars[f"val/{name}/accuracy"] = float((np.sign(good - bad) / 2 + 0.5).mean())
    return scalars


def _worth(sequence: TrainingSequence, logprobs: np.ndarray) -> float:
    if sequence.reference_logprobs is not None:
        return float((logprobs - sequence.reference_logprobs)[sequence.loss_mask].sum())
    return float(logprobs[sequence.loss_mask].mean())
