"""The policy as its own teacher, on real ranks: live, moving and without adapters, after prompts of its own.

Loss and gradient in each layout are those of transformers in float64, written out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.rollout.step.rl_batch import assign_token_weights
from megarl.rollout.step.teacher_prompts import Opening, join_openings
from megarl.tracking.metrics import merge, values
from megarl.types import TrainingSequence
from tests.rank_pool import RankPool
from tests.training.distillation.test_distillation_targets import LAYOUTS, distance, rows_of
from tests.training.invariance import cut_out, join

LENGTHS = [5, 9, 14, 3, 11, 7, 8, 12]
VOCABULARY = 431
GROWN = 1.1
"""The policy's parameters are its initial ones times this, as if it had learnt."""
NAMES = {"policy": "live_teacher", "reference": "reference"}


@pytest.fixture(scope="module")
def policy(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(
        num_layers=4, num_heads=4, num_kv_heads=2, hidden_size=32, intermediate_size=48, vocab_size=VOCABULARY,
        initializer_range=0.06,
    )  # fmt: skip


def recipe_of(policy: Path, teacher: str, loss: str, sections: dict[str, Any], **trainer: Any) -> Recipe:
    algorithm = {"reference_update_steps": 1, "reference_mixing": 0.5} if teacher == "reference" else {}
    if sections:
        algorithm = {}
    return Recipe.model_validate(
        {
            "name": "self",
            "loop": "distillation",
            "model": {"path": str(policy), "dtype": "float32"},
            "data": {"train": "unused"},
            "algorithm": algorithm,
            "trainer": {
                "max_tokens_per_microbatch": 64, "logprob_chunk_tokens": 10, "distributed_optimizer": False, **trainer
            },
            "optimizer": {"clip_grad_norm": 0},
            "distillation": {
                "teacher": teacher, "loss": loss, "teacher_prompt": "{prompt} {context}", "context": ["feedback"],
                "top_k": 6,
            },
            **sections,
        }
    )  # fmt: skip


def make_batch(recipe: Recipe, *, is_tree: bool) -> tuple[TokenBatch, list[Opening]]:
    """Return sequences of random tokens, the fourth without context, and the teacher's openings of them."""
    random = np.random.default_rng(3)
    common = random.integers(1, VOCABULARY, size=max(LENGTHS))
    sequences, openings = [], []
    for number, length in enumerate(LENGTHS):
        prompt = int(random.integers(1, length))
        mask = (np.arange(length) >= prompt) & (np.arange(length) != length - 3)
        ids = random.integers(1, VOCABULARY, size=length)
        if is_tree:
            prompt = max(1, min(prompt, length // 2))
            ids[:prompt] = common[:prompt]
            mask = np.arange(length) >= prompt
        sequences.append(TrainingSequence(ids, mask if number != 3 else np.zeros(length, np.bool_)))
        # The question first, then what only the teacher reads: trees of the teacher share the question too.
        context = random.integers(1, VOCABULARY, size=number % 4 + 1)
        openings.append(Opening(prompt, np.concatenate([ids[:prompt], context])))
    batch = TokenBatch.from_sequences(sequences)
    batch.shares_prefixes = is_tree
    assign_token_weights(batch, recipe.algorithm)
    batch.target_keys = np.column_stack([np.zeros(len(LENGTHS), np.int64), np.arange(len(LENGTHS))])
    return batch, openings


def teach_itself(
    recipe: Recipe, parallel: ParallelConfig, batch: TokenBatch, read: TokenBatch, grown: float
) -> dict[str, Any]:
    """Return one rank's scores and metrics of an update, and its part of the gradient.

    `read` are the sequences as the teacher reads them. The policy's parameters are multiplied by `grown`; a reference
    then moves half of the way.
    """
    from megarl.families.shape import padded_vocab_size
    from megarl.reshard.layouts.megatron import megatron_layouts
    from megarl.worker.trainer_worker import TrainerWorker

    rank = dist.get_rank()
    worker = TrainerWorker(rank, parallel.world_size, recipe, parallel)
    name = NAMES[recipe.distillation.teacher or ""]
    for parameter_name, parameter in worker.policy.parameters.items():
        if recipe.lora.rank and parameter_name.endswith(".b"):
            parameter.data.normal_(generator=torch.Generator().manual_seed(1))
        elif not recipe.lora.rank:
            parameter.data.mul_(grown)
    if name == "reference" and not recipe.lora.rank:
        worker.state.parts["scoring_models"].move_reference()
    everything = np.arange(len(LENGTHS))
    teacher = getattr(worker, name)
    rows = rows_of(recipe, parallel, read, everything)
    scores = teacher.forward(rows)
    numbers = [row.target_keys[:, 1].tolist() for row in rows if row.target_keys is not None]
    adapted = worker.policy.forward(rows)
    metrics, gradient, is_zero = {}, {}, False
    if recipe.distillation.loss != "sampled_token":
        teacher.store_targets(rows)
        metrics = worker.policy.update(rows_of(recipe, parallel, batch, everything)).metrics
        gradients = {name: p.main_grad for name, p in worker.policy.parameters.items() if hasattr(p, "main_grad")}
        is_zero = all(not part.any() for part in gradients.values())
        if not recipe.lora.rank:
            shape = worker.policy.shape
            rows_of_head = padded_vocab_size(shape.vocab_size, parallel.tp)
            pieces = megatron_layouts(shape, parallel, padded_vocab_size=rows_of_head)[rank]
            gradient = cut_out(pieces, gradients)
    worker.replica.close()
    return {
        "scores": dict(zip(map(tuple, numbers), scores or [], strict=False)),
        "adapted": dict(zip(map(tuple, numbers), adapted or [], strict=False)),
        "metrics": metrics,
        "gradient": gradient,
        "is_zero": is_zero,
        "targets": [feed for feed in worker.policy.feeds if "Taught" in type(feed).__name__],
    }


def scaled(policy: Path, factor: float) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


def written_out(
    policy: Path, batch: TokenBatch, read: TokenBatch, teacher_factor: float, factor: float
) -> tuple[float, dict[str, torch.Tensor], list[np.ndarray]]:
    """Return reverse KL, gradient, and the teacher's log-probs of each of its sequences, by transformers' models."""
    student, teacher = scaled(policy, factor), scaled(policy, teacher_factor)
    loss = torch.zeros((), dtype=torch.float64)
    scores = []
    for number in range(len(LENGTHS)):
        mine, its = (
            (torch.from_numpy(one.token_ids[start:end])[None], torch.from_numpy(one.loss_mask[start:end]))
            for one in (batch, read)
            for start, end in [one.cu_seqlens[number : number + 2]]
        )
        with torch.no_grad():
            taught = teacher(its[0]).logits[0, :-1].log_softmax(-1)
        scores.append(taught.gather(-1, its[0][0, 1:, None])[:, 0].numpy())
        if not mine[1].any():
            continue
        weights = torch.from_numpy(batch.per_token["token_weights"][batch.tokens_of([number])]).double()
        learnt = student(mine[0]).logits[0, :-1].log_softmax(-1)[mine[1][1:]]
        target = taught[its[1][1:]]
        loss = loss + (weights[mine[1]] * (learnt.exp() * (learnt - target)).sum(-1)).sum()
    loss.backward()
    return loss.item(), {name: x.grad for name, x in student.named_parameters() if x.grad is not None}, scores


def check_scores(found: list[dict[str, Any]], read: TokenBatch, expected: list[np.ndarray], name: str) -> None:
    """Check the teacher's log-probs of all tokens after the first one of each sequence."""
    numbers = set()
    for rank in found:
        for in_row, row in rank[name].items():
            lengths = [int(read.lengths[number]) for number in in_row]
            for number, part in zip(in_row, np.split(row, np.cumsum(lengths)[:-1]), strict=True):
                np.testing.assert_allclose(part[1:], expected[number], atol=1e-5)
                numbers.add(number)
    assert numbers == set(range(len(LENGTHS)))


CASES = [(teacher, layout) for teacher in NAMES for layout in ("one rank, packed", "tp2", "pp2", "cp2")]
CASES += [("policy", "tp2 pp2, many rows"), ("reference", "tp2 cp2"), ("policy", "trees tp2"), ("reference", "trees")]
CASES += [("policy", "vpp2")]
SIZES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    name: (sizes, trainer) for name, (sizes, _, trainer) in LAYOUTS.items()
} | {
    "tp2 cp2": ({"tp": 2, "cp": 2}, {}),
    "trees": ({}, {}),
    "trees tp2": ({"tp": 2}, {}),
    "vpp2": ({"pp": 2, "vpp": 2}, {}),
}


@pytest.mark.parametrize(("teacher", "layout"), CASES)
def test_loss_gradient_and_scores_are_those_of_float64(
    ranks: RankPool, policy: Path, teacher: str, layout: str
) -> None:
    sizes, trainer = SIZES[layout]
    recipe = recipe_of(policy, teacher, "full_vocabulary", {}, **trainer)
    parallel = replace(ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1), **sizes)
    batch, openings = make_batch(recipe, is_tree="trees" in layout)
    read, _ = join_openings(batch, openings)
    read.shares_prefixes = batch.shares_prefixes
    found = ranks.run(teach_itself, recipe, parallel, batch, read, GROWN, world_size=parallel.world_size)
    # Half of the way from the initial weights to the policy's.
    factor = GROWN if teacher == "policy" else (1 + GROWN) / 2
    loss, gradient, scores = written_out(policy, batch, read, factor, GROWN)
    check_scores(found, read, scores, "scores")
    metrics = values(merge(rank["metrics"] for rank in found))
    assert loss > 1e-3 and metrics["train/loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert distance(join([rank["gradient"] for rank in found]), gradient) <= 1e-5
    assert not any(rank["targets"] for rank in found)


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}], ids=["one rank", "tp2"])
def test_a_live_teacher_of_equal_prompts_teaches_exactly_nothing(
    ranks: RankPool, policy: Path, sizes: dict[str, int]
) -> None:
    recipe = recipe_of(policy, "policy", "full_vocabulary", {})
    parallel = replace(ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1), **sizes)
    batch, _ = make_batch(recipe, is_tree=False)
    found = ranks.run(teach_itself, recipe, parallel, batch, batch, GROWN, world_size=parallel.world_size)
    assert all(rank["is_zero"] for rank in found)
    assert values(merge(rank["metrics"] for rank in found))["train/loss"] == 0.0


@pytest.mark.parametrize("loss", ["sampled_token", "full_vocabulary", "top_k"])
def test_the_reference_of_lora_is_the_policy_without_adapters(ranks: RankPool, policy: Path, loss: str) -> None:
    recipe = recipe_of(policy, "reference", loss, {"lora": {"rank": 4}})
    batch, openings = make_batch(recipe, is_tree=False)
    read, _ = join_openings(batch, openings)
    parallel = ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1)
    found = ranks.run(teach_itself, recipe, parallel, batch, read, 1.0, world_size=1)
    _, _, scores = written_out(policy, batch, read, 1.0, 1.0)
    check_scores(found, read, scores, "scores")
    with pytest.raises(AssertionError):
        check_scores(found, read, scores, "adapted")
    if loss != "sampled_token":
        assert values(found[0]["metrics"])["train/loss"] > 1e-3
