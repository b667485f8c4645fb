"""Reinforcement learning: sample groups of completions, score them, update the policy, reshard; again."""

from __future__ import annotations

from megarl.data.sampler import DataOrder
from megarl.loops.batches import first_gap, reward_metrics, split, to_sequences
from megarl.loops.session import Session, sampling_settings
from megarl.preflight import read_problems
from megarl.tracking.metrics import merge, values


async def train(session: Session) -> None:
    """One step: roll out -> log-probs -> update -> save -> reshard -> evaluate."""
    recipe, tracker, ranks = session.recipe, session.tracker, session.ranks
    problems = read_problems(recipe, session.tokenizer, recipe.data.train)
    order = DataOrder(len(problems), recipe.train.prompts_per_step, recipe.seed, recipe.data.shuffle)
    sampling = sampling_settings(recipe.rollout.sampling)
    if session.folder.resumed_step:
        await session.reshard(session.folder.resumed_step)
    else:
        tracker.log(0, await session.evaluate(0))
    for step in session.steps:
        with tracker.phase("rollout"):
            answered = await session.respondents.answer(
                [problems[index] for index in order.batch(step - 1)],
                sampling,
                samples_per_prompt=recipe.train.samples_per_prompt,
                seed=f"{recipe.seed} {step}",
            )
        await ranks.call("sleep_engine")
        with tracker.phase("logprobs"):
            sequences = await session.add_logprobs(to_sequences(answered, recipe))
        with tracker.phase("train"):
            updates = [await session.trainer.update(batch) for batch in split(sequences, recipe)]
        await session.checkpoints.begin(step)
        with tracker.phase("reshard"):
            scalars = await session.reshard(step)
        scalars |= values(merge(updates)) | first_gap(updates) | reward_metrics(answered)
        if session.evaluates_at(step):
            scalars |= await session.evaluate(step)
        if step % recipe.samples_every_steps == 0:
            tracker.samples(step, [answer.record() for answer in answered])
        tracker.log(step, scalars)
        session.folder.set_status(step=step)
        await session.checkpoints.complete()
