"""Supervised fine-tuning on the assistant's tokens of conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from megarl.data.kinds.conversations import Conversation
from megarl.data.token_batch import TokenBatch
from megarl.datasets.reading import collect_for, read_conversations
from megarl.loops.start_comparison import compare_start
from megarl.loops.started_run import Run
from megarl.platform.spans import span
from megarl.rollout.step.rl_batch import assign_token_weights
from megarl.tracking.metric_rows import MetricRow

METRICS = (MetricRow("val/SET/loss", "nats", "loss of held-out conversations, mean over the assistant's tokens"),)

HeldOut = Mapping[str, Sequence[Conversation]]
"""Held-out conversations by the name of their set in data.validation_conversations."""


async def train(run: Run) -> None:
    """Train on the conversations for the remaining steps. Each step has one update.

    Logs `train/loss` (nats per trained token), `train/entropy`, `train/tokens`, `train/grad_norm`.
    """
    recipe = run.recipe
    collect = collect_for(recipe, run.folder.path)
    conversations = read_conversations(recipe, run.data.tokenizer, recipe.data.train, run.data.dropped, collect=collect)
    held_out: HeldOut = {
        name: read_conversations(recipe, run.data.tokenizer, path, run.data.dropped)[: recipe.evaluation.max_problems]
        for name, path in recipe.data.validation_conversations.items()
    }
    order = run.origin.position.order(recipe, "data.train", len(conversations))
    # Each item drawn before has two events: drawn and used.
    run.data.rewind_draws(2 * order.num_drawn_before(run.folder.resumed_step))
    evaluate = partial(_evaluate, run, held_out)
    await run.evaluate_at_start(evaluate)
    if not run.folder.resumed_step:
        # Engines start awake, but the trainer needs their memory.
        await run.reshard_schedule.sleep_engines()
    await compare_start(run, conversations)

    for number in run.remaining_steps:
        async with run.step(number, evaluate) as step:
            step.log({"data/epoch": order.epochs(number - 1)})
            with span("batch"):
                indices = order.batch(number - 1)
                batch = TokenBatch.from_samples([conversations[index] for index in indices])
                assign_token_weights(batch, recipe.algorithm)
            async with run.updating(step):
                step.log_update(await run.models["policy"].update(batch))
            run.data.write_draws(number, order, indices)
            await run.checkpoints.begin_due_saves(number)


async def _evaluate(run: Run, held_out: HeldOut, step: int) -> dict[str, float]:
    """Return the held-out losses after a step (0: before the first), and the metrics of sampled validation sets."""
    if not step:
        # Sample now, while the engines are awake and have the trainer's initial weights.
        sampling_metrics = await run.evaluate(0)
        await run.reshard_schedule.sleep_engines()
        return sampling_metrics | await _compute_losses(run, held_out)
    metrics = await _compute_losses(run, held_out)
    if any(source.validation for source in run.data.sources):
        # SFT reshards only for an evaluation that samples, because training itself needs no engine.
        with run.tracker.phase("reshard"):
            metrics |= await run.reshard_schedule.run_reshard(step)
        metrics |= await run.evaluate(step)
        await run.reshard_schedule.sleep_engines()
    return metrics


async def _compute_losses(run: Run, held_out: HeldOut) -> dict[str, float]:
    """Return `val/SET/loss` of each held-out set, in nats per token of the assistant."""
    scalars: dict[str, float] = {}
    policy = run.models["policy"]
    with run.tracker.phase("evaluation"), policy.work.uncounted():
        for name, conversations in held_out.items():
            batch = TokenBatch.from_samples(conversations)
            logprobs = await policy.forward(batch)
            scalars[f"val/{name}/loss"] = -float(logprobs[batch.loss_mask].mean(dtype=np.float64))
    return scalars
