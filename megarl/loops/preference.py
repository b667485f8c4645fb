"""The loop of preference learning: a policy or reward model learns from pairs of answers, or from judged answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from megarl.data.kinds.preferences import Answers
from megarl.data.token_batch import TokenBatch
from megarl.datasets.reading import collect_for, read_preferences
from megarl.loops.models import move_reference
from megarl.loops.start_comparison import compare_start
from megarl.loops.started_run import Run
from megarl.rollout.step.rl_batch import assign_token_weights
from megarl.types import TrainingSequence


async def train(run: Run) -> None:
    """Train on pairs of answers, or on judged answers, for the remaining steps. Each step has one update.

    Logs `train/loss` (mean over pairs or answers) and other metrics of the loss. For kto it logs `kl/reference`, in
    nats per answer.
    """
    recipe, tracker = run.recipe, run.tracker
    collect = collect_for(recipe, run.folder.path)
    answers = read_preferences(recipe, run.data.tokenizer, recipe.data.train, run.data.dropped, collect=collect)
    order = run.origin.position.order(recipe, "data.train", len(answers))
    # Each item drawn before has two events: drawn and used.
    run.data.rewind_draws(2 * order.num_drawn_before(run.folder.resumed_step))
    held_out = {
        name: read_preferences(recipe, run.data.tokenizer, path, run.data.dropped)[: recipe.evaluation.max_problems]
        for name, path in recipe.data.validation.items()
    }
    await compare_start(run, answers)
    evaluate = partial(_evaluate, run, held_out)
    await run.evaluate_at_start(evaluate)
    for number in run.remaining_steps:
        async with run.step(number, evaluate) as step:
            step.log({"data/epoch": order.epochs(number - 1)})
            indices = order.batch(number - 1)
            batch = _make_batch([answers[index] for index in indices])
            with tracker.phase("logprobs"):
                await _add_reference_logprobs(run, batch)
            is_judged = recipe.sequences_per_example == 1
            # Computed before the update, to measure the policy that the update starts from.
            kto_kl = await _estimate_kto_kl(run, batch) if is_judged else None
            async with run.updating(step):
                assign_token_weights(
                    batch, recipe.algorithm.model_copy(update={"aggregation": "sequence_mean_token_sum"})
                )
                step.log_update(await run.models["policy"].update(batch, kto_kl=kto_kl))
                if kto_kl is not None:
                    step.log({"kl/reference": kto_kl})
            run.data.write_draws(number, order, indices)
            step.log(await move_reference(run.models, recipe, number))
            await run.checkpoints.begin_due_saves(number)


def _make_batch(answers: Sequence[Answers]) -> TokenBatch:
    """Return all answers as one batch, with the two answers of a pair one after the other."""
    return TokenBatch.from_sequences([sequence for example in answers for sequence in example])


async def _add_reference_logprobs(run: Run, batch: TokenBatch) -> None:
    if run.recipe.has_reference:
        batch.per_token["reference_logprobs"] = await run.models["reference"].forward(batch)


async def _estimate_kto_kl(run: Run, batch: TokenBatch) -> float:
    """Estimate the KL divergence between policy and reference for KTO: nats per answer, at least 0.

    It is the mean log-ratio of mismatched answers.
    """
    batch, num_same_prompt = mismatch_answers(batch)
    if num_same_prompt:
        run.tracker.notice_once(
            "kto",
            f"preference.loss = kto: the KL (kl/reference) should be estimated on answers to other prompts, but "
            f"{num_same_prompt} of {batch.num_sequences} answers of a step have none; set data.shuffle=true, or raise "
            "train.prompts_per_step",
        )
    with run.tracker.phase("logprobs"):
        await _add_reference_logprobs(run, batch)
        logprobs = await run.models["policy"].forward(batch)
    return max(0.0, float(np.mean(answer_scores(batch, logprobs, by_length=False))))


def mismatch_answers(batch: TokenBatch) -> tuple[TokenBatch, int]:
    """Return the prompts of judged answers, each with the answer some places later in the batch.

    The distance is the shortest at which the fewest prompts get an answer to the same prompt. The number of these
    prompts is returned too. Each answer is used once, so good and bad ones keep their shares.
    """
    max_length = int(batch.lengths.max())
    answers = [ids[mask] for ids, mask in _split_by_sequence(batch)]
    prompts = _prompts_of(batch)
    distance, num_same_prompt = _find_distance(prompts)
    sequences = []
    for index, prompt in enumerate(prompts):
        # Cut to the longest sequence of the batch: a longer one could exceed the microbatch's tokens.
        mismatched_tokens = np.concatenate([prompt, answers[(index + distance) % len(prompts)]])[:max_length]
        sequences.append(TrainingSequence(mismatched_tokens, np.arange(len(mismatched_tokens)) >= len(prompt)))
    return TokenBatch.from_sequences(sequences), num_same_prompt


def _find_distance(prompts: Sequence[NDArray[np.int64]]) -> tuple[int, int]:
    """Return the distance for `mismatch_answers`, and how many prompts equal the prompt at this distance."""
    numbers_by_prompt: dict[bytes, int] = {}
    prompt_numbers = np.array([numbers_by_prompt.setdefault(p.tobytes(), len(numbers_by_prompt)) for p in prompts])
    best_distance, fewest_same_prompt = 0, len(prompts)
    for distance in range(1, len(prompts)):
        num_same_prompt = int((prompt_numbers == np.roll(prompt_numbers, -distance)).sum())
        if num_same_prompt < fewest_same_prompt or not best_distance:
            best_distance, fewest_same_prompt = distance, num_same_prompt
        # Records made from pairs have each prompt twice, maybe one after the other: distance 2 then has none.
        if not fewest_same_prompt:
            break
    return best_distance, fewest_same_prompt


def _prompts_of(batch: TokenBatch) -> list[NDArray[np.int64]]:
    return [ids[: mask.argmax()] for ids, mask in _split_by_sequence(batch)]


def _split_by_sequence(batch: TokenBatch) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """Return the token ids and the loss mask of each sequence, [tokens of the sequence] each."""
    arrays = (np.split(values, batch.cu_seqlens[1:-1]) for values in (batch.token_ids, batch.loss_mask))
    return list(zip(*arrays, strict=True))


async def _evaluate(run: Run, held_out: Mapping[str, Sequence[Answers]], step: int) -> dict[str, float]:
    """Return `val/SET/accuracy` for each held-out set.

    For pairs it is the share in which the chosen answer has the higher score: that of `answer_scores`, or of the reward
    model. For judged answers it is the probability that a desirable answer has a higher score than an undesirable one
    (AUC).
    """
    scalars: dict[str, float] = {}
    policy = run.models["policy"]
    with run.tracker.phase("evaluation"), policy.work.uncounted():
        for name, answers in held_out.items():
            batch = _make_batch(answers)
            await _add_reference_logprobs(run, batch)
            by_length = run.recipe.preference.normalize_by_length
            scores = answer_scores(batch, await policy.forward(batch), by_length=by_length)
            # `_make_batch` stores the chosen and the rejected answer of a pair alternately.
            better_scores, worse_scores = scores[::2], scores[1::2]
            if run.recipe.sequences_per_example == 1:
                is_good = np.maximum.reduceat(batch.per_token["desirable"], batch.cu_seqlens[:-1]) > 0
                # Broadcast to all combinations of a desirable and an undesirable answer.
                better_scores, worse_scores = scores[is_good, None], scores[None, ~is_good]
            # Without answers of both kinds AUC is undefined, so the set has no metric.
            if not better_scores.size or not worse_scores.size:
                continue
            # A tie counts as half a win. Before training every pair is a tie, so accuracy starts at 0.5.
            scalars[f"val/{name}/accuracy"] = float((np.sign(better_scores - worse_scores) / 2 + 0.5).mean())
    return scalars


def answer_scores(batch: TokenBatch, logprobs: NDArray[np.float32], *, by_length: bool) -> NDArray[np.float64]:
    """Return how much the policy prefers each answer: float64 [sequences], in nats.

    With a reference model, this is the sum of the log-ratios of policy and reference over the answer's tokens.
    `by_length` takes the mean instead (preference.normalize_by_length). Without a reference model, it is the mean
    log-prob. `logprobs` are the policy's, float32 [tokens].
    """
    reference_logprobs = batch.per_token.get("reference_logprobs")
    token_scores = logprobs if reference_logprobs is None else logprobs - reference_logprobs
    borders = batch.cu_seqlens[1:-1]
    scores_by_answer = [
        sequence_scores[mask]
        for sequence_scores, mask in zip(
            np.split(token_scores, borders), np.split(batch.loss_mask, borders), strict=True
        )
    ]
    is_mean = by_length or reference_logprobs is None
    return np.array([float(scores.mean() if is_mean else scores.sum()) for scores in scores_by_answer])
