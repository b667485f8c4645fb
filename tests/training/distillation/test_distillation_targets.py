"""The gradient of a distillation on real ranks: in each layout that of transformers in float64, written out."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.rollout.step.rl_batch import assign_token_weights
from megarl.tracking.metrics import merge, values
from megarl.types import TrainingSequence
from tests.rank_pool import RankPool
from tests.token_batches import own_rows
from tests.training.invariance import cut_out, join

LENGTHS = [5, 9, 14, 2, 11, 7, 8, 16, 4, 13]
TEMPERATURE, TOP_K, BETA = 0.8, 6, 0.3
TOKENS = 400
"""Tokens that are drawn: both vocabularies have them, and padding beside."""


@pytest.fixture(scope="module")
def folders(tiny_model: Callable[..., Path]) -> tuple[Path, list[Path]]:
    """A policy and two teachers, all of other sizes; each vocabulary has rows that others lack."""
    sizes: dict[str, Any] = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "initializer_range": 0.1}
    policy = tiny_model(
        hidden_size=32, intermediate_size=48, vocab_size=431, **(sizes | {"num_layers": 4, "initializer_range": 0.06})
    )
    large = tiny_model(hidden_size=48, intermediate_size=64, vocab_size=419, seed=5, tie_word_embeddings=False, **sizes)
    other = tiny_model(family="llama", hidden_size=40, intermediate_size=32, vocab_size=463, seed=7, **sizes)
    return policy, [large, other]


def recipe_of(policy: Path, teachers: list[Path], loss: str, divergence: str, **trainer: Any) -> Recipe:
    distillation = {
        "teacher": str(teachers[0]), "loss": loss, "divergence": divergence, "temperature": TEMPERATURE,
        "top_k": TOP_K, "jsd_beta": BETA, "tail": "renormalize" if divergence == "forward_kl" else "bucket",
    }  # fmt: skip
    return Recipe.model_validate(
        {
            "name": "distillation",
            "loop": "distillation",
            "model": {"path": str(policy), "dtype": "float32"},
            "data": {"train": "unused"},
            "mixture": {"large": {}, "other": {"distillation": {"teacher": str(teachers[1])}}},
            "trainer": {
                "max_tokens_per_microbatch": 64, "logprob_chunk_tokens": 10, "distributed_optimizer": False, **trainer
            },
            "optimizer": {"clip_grad_norm": 0},
            "distillation": distillation,
        }
    )  # fmt: skip


def make_batch(recipe: Recipe, shares_prefixes: bool = False) -> TokenBatch:
    """Random tokens after prompts, every third sequence the second teacher's.

    With `shares_prefixes`, half of each sequence is the beginning of one sequence common to all.
    """
    random = np.random.default_rng(11)
    common = np.random.default_rng(12).integers(1, TOKENS, size=max(LENGTHS))
    sequences = []
    for length in LENGTHS:
        prompt = int(random.integers(1, length))
        # What an environment said between is not trained.
        mask = (np.arange(length) >= prompt) & (np.arange(length) != length - 3)
        ids = random.integers(1, TOKENS, size=length)
        if shares_prefixes:
            ids[: length // 2] = common[: length // 2]
        sequences.append(TrainingSequence(ids, mask))
    batch = TokenBatch.from_sequences(sequences)
    batch.shares_prefixes = shares_prefixes
    assign_token_weights(batch, recipe.algorithm)
    numbers = np.arange(len(LENGTHS))
    batch.target_keys = np.column_stack([(numbers % 3 == 1).astype(np.int64), numbers])
    return batch


def rows_of(recipe: Recipe, parallel: ParallelConfig, batch: TokenBatch, of: np.ndarray) -> list[TokenBatch]:
    """This rank's rows of some of the sequences."""
    rows = own_rows(batch.lengths[of], parallel, recipe.trainer.max_tokens_per_microbatch)
    chosen = [batch.select(of[row]) for row in rows]
    return [replace(row, shares_prefixes=batch.shares_prefixes) for row in chosen]


def distil(
    recipe: Recipe, parallel: ParallelConfig, teacher_parallel: ParallelConfig, batch: TokenBatch
) -> dict[str, Any]:
    """One rank's metrics of an update, what it held for it, and what it holds of the gradient."""
    from megarl.families.shape import padded_vocab_size
    from megarl.reshard.layouts.megatron import megatron_layouts
    from megarl.worker.teachers import Teachers
    from megarl.worker.trainer_worker import TrainerWorker

    rank = dist.get_rank()
    worker = TrainerWorker(rank, parallel.world_size, recipe, parallel, teacher_parallel)
    assert batch.target_keys is not None
    for number, name in enumerate(recipe.teachers):
        own = np.flatnonzero(batch.target_keys[:, 0] == number)
        # Every rank needs a row, and a target may be written twice.
        own = np.concatenate([own, np.tile(own[-1:], -len(own) % teacher_parallel.dp)])
        num_not_finite = getattr(worker, name).store_targets(rows_of(recipe, teacher_parallel, batch, own))
        assert num_not_finite == 0
    teachers = worker.find_part(Teachers)
    held = teachers.targets.numbers
    metrics = worker.policy.update(rows_of(recipe, parallel, batch, np.arange(len(LENGTHS)))).metrics
    shape = worker.policy.shape
    pieces = megatron_layouts(shape, parallel, padded_vocab_size=padded_vocab_size(shape.vocab_size, parallel.tp))[rank]
    for replica in (worker.replica, *teachers.replicas):
        replica.close()
    return {
        "metrics": metrics,
        "held": held,
        "groups": len(teachers.replicas),
        "left": teachers.targets.numbers,
        "targets": [len(getattr(chunk, "_targets")) for chunk in worker.policy.chunks],  # noqa: B009
        "gradient": cut_out(pieces, {name: p.main_grad for name, p in worker.policy.parameters.items()}),
    }


def written_out(recipe: Recipe, batch: TokenBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient by transformers' models and the formulas, in float64."""
    from transformers import AutoModelForCausalLM

    def load(folder: str) -> Any:
        # transformers' grouped products of experts have no float64.
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()

    assert batch.target_keys is not None
    policy, teachers, config = load(recipe.model.path), list(map(load, recipe.teachers.values())), recipe.distillation
    loss = torch.zeros((), dtype=torch.float64)
    for start, end, number in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], batch.target_keys[:, 0], strict=True):
        tokens = torch.from_numpy(batch.token_ids[start:end])[None]
        weights = torch.from_numpy(batch.per_token["token_weights"][start + 1 : end]).double()
        with torch.no_grad():
            teacher = teachers[number](tokens).logits[0, :-1]
        student = policy(tokens).logits[0, :-1]
        common = min(student.size(-1), teacher.size(-1))
        p, q = ((logits[:, :common] / TEMPERATURE).softmax(-1) for logits in (student, teacher))
        if config.loss == "top_k":
            ids = q.topk(TOP_K).indices
            p, q = p.gather(-1, ids), q.gather(-1, ids)
            if config.tail == "bucket":
                p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (p, q))
            else:
                p, q = (x / x.sum(-1, keepdim=True) for x in (p, q))
        m = BETA * q + (1 - BETA) * p
        of_tokens = {
            "reverse_kl": p * (p / q).log(),
            "forward_kl": q * (q / p).log(),
            "jsd": BETA * q * (q / m).log() + (1 - BETA) * p * (p / m).log(),
        }[config.divergence]
        loss = loss + (weights * of_tokens.sum(-1)).sum()
    loss.backward()
    return loss.item(), {name: x.grad for name, x in policy.named_parameters() if x.grad is not None}


def distance(got: Mapping[str, Any], expected: Mapping[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm, of all tensors together."""
    assert got.keys() == expected.keys()
    gap = sum((torch.from_numpy(got[n]).double() - expected[n]).square().sum() for n in expected)
    return float((gap / sum(expected[n].square().sum() for n in expected)) ** 0.5)


LAYOUTS: dict[str, tuple[dict[str, int], dict[str, int], dict[str, Any]]] = {
    "one rank, packed": ({}, {}, {"max_tokens_per_microbatch": 128}),
    "tp2": ({"tp": 2}, {"tp": 2}, {}),
    "pp2": ({"pp": 2}, {"pp": 2}, {}),
    "cp2": ({"cp": 2}, {"cp": 2}, {}),
    "tp2 pp2, many rows": ({"tp": 2, "pp": 2}, {"tp": 2, "pp": 2}, {"max_tokens_per_microbatch": 24}),
    "tp2 dp2 without sequence parallelism": ({"tp": 2, "dp": 2}, {"tp": 2, "dp": 2}, {"sequence_parallel": False}),
    "tp2 cp2, teachers pp2 dp2": ({"tp": 2, "cp": 2}, {"pp": 2, "dp": 2}, {}),
    "pp2 vpp2 dp2, teachers tp2 cp2": ({"pp": 2, "vpp": 2, "dp": 2}, {"tp": 2, "cp": 2}, {}),
}
"""Name to parallel sizes of policy and teachers, and fields of the recipe's trainer section."""
LOSSES = {
    "reverse": ("full_vocabulary", "reverse_kl"),
    "forward": ("full_vocabulary", "forward_kl"),
    "jsd": ("full_vocabulary", "jsd"),
    "top-k": ("top_k", "reverse_kl"),
    "top-k renormalized": ("top_k", "forward_kl"),
}
CASES = [(parallel, "reverse") for parallel in LAYOUTS]
CASES += [("tp2 cp2, teachers pp2 dp2", loss) for loss in LOSSES if loss != "reverse"]
CASES += [("tp2 pp2, many rows", "top-k"), ("one rank, packed", "jsd")]


@pytest.mark.parametrize(("name", "loss"), CASES)
def test_the_gradient_is_that_of_float64(
    ranks: RankPool, folders: tuple[Path, list[Path]], name: str, loss: str
) -> None:
    found = learn_exactly(ranks, *folders, name, loss)
    # Both teachers are dense and share their groups.
    assert {rank["groups"] for rank in found} == {int("teachers" in name)}


@pytest.mark.parametrize("loss", ["reverse", "top-k"])
@pytest.mark.parametrize("name", ["one rank, packed", "tp2", "pp2"])
def test_rows_stored_as_trees_learn_the_same(
    ranks: RankPool, folders: tuple[Path, list[Path]], name: str, loss: str
) -> None:
    learn_exactly(ranks, *folders, name, loss, shares_prefixes=True)


def test_a_teacher_with_experts(
    ranks: RankPool, folders: tuple[Path, list[Path]], tiny_model: Callable[..., Path]
) -> None:
    policy, [_, dense] = folders
    experts = tiny_model(
        family="qwen3_moe", hidden_size=48, vocab_size=419, seed=5, num_layers=2, num_heads=4, num_kv_heads=2,
        initializer_range=0.1,
    )  # fmt: skip
    found = learn_exactly(ranks, policy, [experts, dense], "tp2", "reverse")
    assert {rank["groups"] for rank in found} == {1}


def count_faulty_targets(recipe: Recipe, batch: TokenBatch) -> list[int]:
    """Return the numbers of targets that are not finite, by teacher."""
    from megarl.worker.trainer_worker import TrainerWorker

    parallel = ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1)
    worker = TrainerWorker(0, 1, recipe, parallel, parallel)
    assert batch.target_keys is not None
    counts = []
    for number, name in enumerate(recipe.teachers):
        own = np.flatnonzero(batch.target_keys[:, 0] == number)
        counts.append(getattr(worker, name).store_targets(rows_of(recipe, parallel, batch, own)))
    worker.replica.close()
    return counts


@pytest.mark.parametrize("loss", ["reverse", "top-k"])
def test_targets_that_are_not_finite_are_counted(
    ranks: RankPool, folders: tuple[Path, list[Path]], tmp_path: Path, loss: str
) -> None:
    policy, [large, other] = folders
    shutil.copytree(large, tmp_path / "large")
    [file] = (tmp_path / "large").glob("*.safetensors")
    tensors = load_file(file)
    # Weights with NaN are refused when they are loaded. These overflow.
    tensors["model.layers.1.mlp.up_proj.weight"].fill_(3e38)
    save_file(tensors, file, {"format": "pt"})
    recipe = recipe_of(policy, [tmp_path / "large", other], *LOSSES[loss], max_tokens_per_microbatch=128)
    batch = make_batch(recipe)
    assert batch.target_keys is not None
    trained = [batch.select(np.flatnonzero(batch.target_keys[:, 0] == teacher)).loss_mask for teacher in range(2)]
    [counts] = ranks.run(count_faulty_targets, recipe, batch, world_size=1)
    assert counts == [trained[0].sum(), 0]


def learn_exactly(
    ranks: RankPool, policy: Path, teachers: list[Path], name: str, loss: str, *, shares_prefixes: bool = False
) -> list[dict[str, Any]]:
    """Return the metrics of a layout's ranks for an update. Loss and gradient are compared with float64."""
    sizes, of_teachers, trainer = LAYOUTS[name]
    recipe = recipe_of(policy, teachers, *LOSSES[loss], **trainer)
    one = ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1)
    parallel, teacher_parallel = replace(one, **sizes), replace(one, **of_teachers)
    batch = make_batch(recipe, shares_prefixes)
    found = ranks.run(distil, recipe, parallel, teacher_parallel, batch, world_size=parallel.world_size)
    expected_loss, expected = written_out(recipe, batch)
    metrics = values(merge(rank["metrics"] for rank in found))
    assert metrics["train/loss"] == pytest.approx(expected_loss, rel=1e-6, abs=1e-6)
    # Token weights are those of a mean over tokens.
    assert metrics["distillation/divergence"] == pytest.approx(expected_loss, rel=1e-6, abs=1e-6)
    # Of a few tokens alone the differences are small beside the float32 logits that they are of.
    limit = 1e-6 if recipe.distillation.loss == "full_vocabulary" else 2e-6
    assert distance(join([rank["gradient"] for rank in found]), expected) <= limit
    assert {number for rank in found for number in rank["held"]} == set(range(len(LENGTHS)))
    assert not any(rank["left"] or any(rank["targets"]) for rank in found)
    return found
