"""Balancing losses of experts: means over an update's tokens, whatever rows and ranks hold them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from megarl.families.shape import read_model_shape
from megarl.tracking.metrics import merge, values
from megarl.types import TrainingSequence
from tests.rank_pool import RankPool
from tests.token_batches import own_rows
from tests.training.invariance import cut_out, join

VOCABULARY, TOP_K, NUM_EXPERTS = 431, 2, 4
COEFFICIENTS = {"aux_loss": 0.5, "seq_aux_loss": 0.3, "z_loss": 0.02}
BATCH_SIZES = (3, 6, 12)


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model(
        family="qwen3_moe", hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=VOCABULARY,
        initializer_range=0.3, num_experts=NUM_EXPERTS, experts_per_token=TOP_K,
    )  # fmt: skip


def recipe_of(folder: Path, megatron: Mapping[str, Any], **trainer: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "balance",
            "loop": "sft",
            "model": {"path": str(folder), "dtype": "float32"},
            "data": {"train": "unused"},
            "trainer": {
                "max_tokens_per_microbatch": 512,
                "distributed_optimizer": False,
                "megatron": dict(megatron),
                **trainer,
            },
            "optimizer": {"name": "sgd", "learning_rate": 1e-30, "clip_grad_norm": 0.0},
        }
    )


def make_sequences(number: int) -> list[TrainingSequence]:
    """Random tokens of odd lengths, whose own loss weighs nothing: all gradient is the experts'."""
    random = np.random.default_rng(number)
    return [
        TrainingSequence(
            token_ids=random.integers(1, VOCABULARY, length),
            loss_mask=np.arange(length) > 0,
            token_weights=np.zeros(length, np.float32),
        )
        for length in random.integers(3, 30, number).tolist()
    ]


def updated(recipe: Recipe, parallel: ParallelConfig, batches: list[list[TrainingSequence]]) -> list[dict[str, Any]]:
    """One rank's metrics and gradients of an update on each batch."""
    from megarl.checkpoint import safetensors
    from megarl.families.shape import padded_vocab_size
    from megarl.reshard.layouts.megatron import megatron_layouts
    from megarl.training.training_engine import TrainingEngine

    shape = read_model_shape(recipe.model.path)
    layouts = megatron_layouts(shape, parallel, padded_vocab_size=padded_vocab_size(shape.vocab_size, parallel.tp))
    pieces = layouts[dist.get_rank()]
    engine = TrainingEngine(recipe, parallel, shape, lambda p: safetensors.load(recipe.model.path, pieces, p))
    found = []
    for sequences in batches:
        batch = TokenBatch.from_sequences(sequences)
        rows = own_rows(batch.lengths, parallel, recipe.trainer.max_tokens_per_microbatch)
        metrics = engine.update([batch.select(row) for row in rows]).metrics
        parameters: dict[str, Any] = engine.parameters
        gradients = {n: p.main_grad for n, p in parameters.items()}
        found.append({"metrics": metrics, "gradients": cut_out(pieces, gradients), "rows": len(rows)})
    return found


def gradients_of(
    ranks: RankPool,
    folder: Path,
    sizes: Mapping[str, int],
    megatron: Mapping[str, Any],
    batches: list[list[TrainingSequence]],
    **trainer: Any,
) -> list[dict[str, Any]]:
    """Each batch's metrics and whole gradients."""
    parallel = replace(ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1), **dict[str, Any](sizes))
    recipe = recipe_of(folder, megatron, **trainer)
    results = ranks.run(updated, recipe, parallel, batches, world_size=parallel.world_size)
    return [
        {
            "metrics": values(merge(part["metrics"] for part in parts)),
            "gradients": join([part["gradients"] for part in parts]),
            "rows": parts[0]["rows"],
        }
        for parts in zip(*results, strict=True)
    ]


def oracle(folder: Path, sequences: list[TrainingSequence], names: tuple[str, ...]) -> dict[str, Any]:
    """The losses written out in float64 on the router logits of transformers' model, and their gradients."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
    gates = [layer.mlp.gate for layer in model.model.layers]
    inputs: list[torch.Tensor] = []
    for gate in gates:
        gate.register_forward_hook(lambda _, given, __: inputs.append(given[0].flatten(0, -2)))
    for sequence in sequences:
        model(torch.from_numpy(sequence.token_ids)[None])
    lengths = [len(s.token_ids) for s in sequences]
    total, metrics = torch.zeros((), dtype=torch.float64), dict.fromkeys(names, 0.0)
    for layer, gate in enumerate(gates):
        logits = torch.cat(inputs[layer :: len(gates)]) @ gate.weight.T
        of_sequences = torch.stack([balance(part) * len(part) for part in logits.split(lengths)])
        losses = {
            "aux_loss": balance(logits),
            "seq_aux_loss": of_sequences.sum() / len(logits),
            "z_loss": logits.logsumexp(-1).square().mean(),
        }
        for name in names:
            total = total + COEFFICIENTS[name] * losses[name]
            metrics[name] += losses[name].item() / len(gates)
    total.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"metrics": metrics, "gradients": {n: g.numpy() for n, g in by_expert(found).items()}}


def by_expert(gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients by the names of a model folder, where transformers holds a layer's experts together."""
    found = {}
    for name, value in gradients.items():
        prefix, _, kind = name.partition(".experts.")
        if not kind:
            found[name] = value
            continue
        for number, expert in enumerate(value):
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for part, values_of_part in zip(kinds, expert.chunk(len(kinds)), strict=True):
                found[f"{prefix}.experts.{number}.{part}.weight"] = values_of_part
    return found


def balance(logits: torch.Tensor) -> torch.Tensor:
    """experts * sum_i (share of choices of i) * (mean probability of i), of logits [tokens, experts]."""
    probabilities = logits.softmax(-1)
    chosen = torch.zeros_like(logits).scatter(1, logits.topk(TOP_K, dim=1).indices, 1.0)
    return NUM_EXPERTS * (chosen.mean(0) / TOP_K * probabilities.mean(0)).sum()


def distance(got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """Norm of the difference over the norm, of all tensors together; a missing expected one is zero."""
    square = sum(np.square(got[n] - expected.get(n, 0.0)).sum() for n in got)
    return float((square / sum(np.square(value).sum() for value in expected.values())) ** 0.5)


LOSSES = [
    pytest.param({"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.02}, ("aux_loss", "z_loss"), id="batch and z"),
    pytest.param(
        {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.3}, ("seq_aux_loss",), id="sequence"
    ),
    pytest.param(
        {"moe_router_load_balancing_type": ["global_aux_loss"], "moe_aux_loss_coeff": [0.5]}, ("aux_loss",), id="global"
    ),
]


@pytest.mark.parametrize(("megatron", "names"), LOSSES)
def test_gradients_are_those_of_float64_at_any_batch_size(
    ranks: RankPool, folder: Path, megatron: dict[str, Any], names: tuple[str, ...]
) -> None:
    batches = [make_sequences(number) for number in BATCH_SIZES]
    found = gradients_of(ranks, folder, {}, megatron, batches, max_tokens_per_microbatch=40)
    assert found[-1]["rows"] > 2
    for sequences, got in zip(batches, found, strict=True):
        expected = oracle(folder, sequences, names)
        assert distance(got["gradients"], expected["gradients"]) < 1e-5
        for name, value in expected["metrics"].items():
            is_global = "global_aux_loss" in megatron.get("moe_router_load_balancing_type", ())
            logged = f"train/moe_{'global_' if is_global else ''}{name}"
            assert got["metrics"][logged] == pytest.approx(value, rel=1e-5)
        assert got["metrics"]["train/loss"] == 0


EVERY_LOSS = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
    "moe_aux_loss_coeff": [0.5, 0.3],
    "moe_z_loss_coeff": 0.02,
}


@pytest.mark.parametrize(
    ("sizes", "trainer"),
    [
        pytest.param({}, {"max_tokens_per_microbatch": 32}, id="rows"),
        pytest.param({"tp": 2}, {}, id="tp2"),
        pytest.param({"cp": 2, "ep": 2}, {}, id="cp2 ep2"),
        pytest.param({"dp": 2, "ep": 2}, {"max_tokens_per_microbatch": 48}, id="dp2 ep2, rows"),
        pytest.param({"pp": 2}, {"recompute": "full", "max_tokens_per_microbatch": 32}, id="pp2, recomputed"),
        pytest.param({"tp": 2, "pp": 2}, {"max_tokens_per_microbatch": 48}, id="tp2 pp2"),
    ],
)
def test_gradients_do_not_depend_on_the_cut(
    ranks: RankPool, folder: Path, sizes: dict[str, int], trainer: dict[str, Any]
) -> None:
    sequences = make_sequences(9)
    expected = oracle(folder, sequences, ("aux_loss", "seq_aux_loss", "z_loss"))
    [got] = gradients_of(ranks, folder, sizes, EVERY_LOSS, [sequences], **trainer)
    assert distance(got["gradients"], expected["gradients"]) < 1e-5
    assert {n: got["metrics"][f"train/moe_{n}"] for n in COEFFICIENTS} == pytest.approx(expected["metrics"], rel=1e-5)


def test_biases_of_experts_are_trained_on_the_rank_of_their_expert(
    ranks: RankPool, tiny_model: Callable[..., Path]
) -> None:
    """Megatron would add up the gradients of different experts' biases over the tensor-parallel ranks."""
    folder = tiny_model(
        family="gpt_oss", hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
        vocab_size=VOCABULARY, initializer_range=0.3, num_experts=NUM_EXPERTS, experts_per_token=TOP_K,
    )  # fmt: skip
    sequences = make_sequences(6)
    [expected] = gradients_of(ranks, folder, {}, EVERY_LOSS, [sequences])
    [got] = gradients_of(ranks, folder, {"tp": 2, "ep": 2}, EVERY_LOSS, [sequences])
    biases = [name for name in expected["gradients"] if ".experts." in name and name.endswith("bias")]
    assert any(expected["gradients"][name].any() for name in biases)
    assert distance(got["gradients"], expected["gradients"]) < 1e-5
    assert got["metrics"]["train/grad_norm"] == pytest.approx(expected["metrics"]["train/grad_norm"], rel=1e-5)
