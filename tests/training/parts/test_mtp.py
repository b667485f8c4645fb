"""Layers for multi-token prediction: trained with their own loss. The policy's numbers do not change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.families.shape import read_model_shape
from megarl.tracking.metrics import merge, values
from tests.models.drafts.mtp_layer import MtpOracle
from tests.rank_pool import RankPool
from tests.token_batches import own_rows
from tests.training.invariance import cut_out, join
from tests.training.uneven_sequences import make_sequences

COEFFICIENT = 0.3
SIZES: dict[str, Any] = dict(
    hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16, num_mtp_layers=1, initializer_range=0.2, num_experts=4,
    experts_per_token=2, expert_intermediate_size=24, intermediate_size=48,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "glm4_moe": {"num_layers": 3},
    "deepseek_v3": {"num_layers": 2, "query_rank": 24, "num_experts": 8, "experts_per_token": 4},
    "glm4_moe_lite": {"num_layers": 2, "query_rank": None},
    "qwen3_next": {"num_layers": 4},
    "qwen3_5_text": {"num_layers": 4, "tie_word_embeddings": True},
    "qwen3_5_moe_text": {"num_layers": 4},
    # With a vision tower, and experts packed in files.
    "qwen3_5_moe": {"num_layers": 4},
}
LAYOUTS = {
    "one rank": {},
    "tensor": {"tp": 2},
    "pipeline": {"pp": 2},
    "chunks": {"pp": 2, "vpp": 2},
    "context": {"cp": 2},
    "experts": {"dp": 2, "ep": 2},
}


@pytest.fixture(scope="module")
def folder_of(tiny_model: Callable[..., Path]) -> Callable[[str, str], Path]:
    """The model of a family for a layout. Two chunks on each of two stages need four layers."""

    def made(family: str, layout: str) -> Path:
        deeper = {"num_layers": 4} if layout == "chunks" else {}
        return tiny_model(family=family, **SIZES | MODELS[family] | deeper)

    return made


def recipe_of(folder: Path, coefficient: float | None, **trainer: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "mtp",
            "loop": "sft",
            "model": {"path": str(folder), "dtype": "float32"},
            "data": {"train": "unused"},
            "trainer": {
                "max_tokens_per_microbatch": 48,
                "distributed_optimizer": False,
                "mtp_loss_coefficient": coefficient,
                **trainer,
            },
            "optimizer": {"name": "sgd", "learning_rate": 0.05, "schedule": "constant", "clip_grad_norm": 0.1},
        }
    )


def updated(recipe: Recipe, parallel: ParallelConfig, out: str | None) -> dict[str, Any]:
    """One rank's log-probs, then its metrics, gradients and weights of one update; with `out` two exports."""
    from megarl.checkpoint import safetensors
    from megarl.families.shape import padded_vocab_size
    from megarl.reshard.layouts.megatron import check_shapes, megatron_layouts, parameter_shapes
    from megarl.training.training_engine import TrainingEngine

    shape, rank = read_model_shape(recipe.model.path), dist.get_rank()
    shape = shape.with_draft_layers(recipe.trainer.trains_draft_layers)
    layouts = megatron_layouts(shape, parallel, padded_vocab_size=padded_vocab_size(shape.vocab_size, parallel.tp))

    def load(tensors: Mapping[str, torch.Tensor]) -> None:
        check_shapes(parameter_shapes(layouts, parallel.coordinates(rank)), tensors)
        safetensors.load(
            recipe.model.path, layouts[rank], tensors, with_draft_layers=recipe.trainer.trains_draft_layers
        )

    engine = TrainingEngine(recipe, parallel, shape, load)

    def export(name: str) -> None:
        if out is not None:
            safetensors.export(
                Path(out) / name, recipe.model.path, shape, layouts, rank, engine.tensors, dtype=torch.float32,
                bucket_bytes=1 << 16,
            )  # fmt: skip

    export("before")
    batch = TokenBatch.from_sequences(make_sequences())
    rows = own_rows(batch.lengths, parallel, recipe.trainer.max_tokens_per_microbatch)
    own = [batch.select(row) for row in rows]
    logprobs = engine.forward(own)
    metrics = engine.update(own).metrics
    parameters: dict[str, Any] = engine.parameters
    pieces = [piece for piece in layouts[rank] if piece.storage in parameters]
    gradients = cut_out(pieces, {name: parameter.main_grad for name, parameter in parameters.items()})
    export("after")
    return {
        "logprobs": logprobs, "metrics": metrics, "gradients": gradients, "weights": cut_out(pieces, parameters)
    }  # fmt: skip


@pytest.fixture(scope="module")
def outcome(
    ranks: RankPool, folder_of: Callable[[str, str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Any]]:
    """Log-probs, metrics, whole gradients and weights of an update, and the folders exported before and after it."""

    def run(name: str, coefficient: float | None, recompute: str = "none", family: str = "glm4_moe") -> dict[str, Any]:
        parallel = replace(ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1), **LAYOUTS[name])
        out = tmp_path_factory.mktemp("exported")
        recipe = recipe_of(folder_of(family, name), coefficient, recompute=recompute)
        parts = ranks.run(updated, recipe, parallel, str(out), world_size=parallel.world_size)
        return {
            "logprobs": [row for part in parts for row in part["logprobs"] or ()],
            "metrics": values(merge(part["metrics"] for part in parts)),
            **{key: join([part[key] for part in parts]) for key in ("gradients", "weights")},
            "out": out,
        }

    return cache(run)


def oracle(folder: Path) -> tuple[float, dict[str, np.ndarray]]:
    """The mean loss and the loss's gradients in float64, by transformers' modules."""
    layer = MtpOracle(folder, torch.float64)
    total, losses = torch.zeros((), dtype=torch.float64), []
    for sequence in make_sequences():
        tokens = torch.from_numpy(sequence.token_ids)
        logprobs = layer.predicted(tokens).log_softmax(-1)
        assert sequence.token_weights is not None
        for place in range(2, len(tokens)):
            if sequence.loss_mask[place]:
                loss = -logprobs[place - 2, tokens[place]]
                total = total + COEFFICIENT * float(sequence.token_weights[place]) * loss
                losses.append(loss.item())
    total.backward()
    return float(np.mean(losses)), {name: value.numpy() for name, value in layer.gradients().items()}


def is_mtp(name: str, layout: str, family: str = "glm4_moe") -> bool:
    number = 4 if layout == "chunks" else MODELS[family]["num_layers"]
    return name.startswith(("mtp.", f"model.layers.{number}."))


CASES = [
    *(pytest.param("glm4_moe", parallel, id=f"glm4_moe, {parallel}") for parallel in LAYOUTS),
    *(pytest.param(family, "one rank", id=family) for family in MODELS if family != "glm4_moe"),
    pytest.param("deepseek_v3", "tensor", id="deepseek_v3, tensor"),
    pytest.param("qwen3_5_text", "pipeline", id="qwen3_5_text, tied, pipeline"),
]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_the_policy_is_the_same_bit_for_bit(outcome: Callable[..., dict[str, Any]], family: str, layout: str) -> None:
    alone, together = (outcome(layout, coefficient, family=family) for coefficient in (None, COEFFICIENT))
    assert len(alone["logprobs"]) > 1
    for one, other in zip(alone["logprobs"], together["logprobs"], strict=True):
        np.testing.assert_array_equal(one, other)
    # The gradient's norm, and so its clipping, counts the policy alone.
    assert alone["metrics"]["train/grad_norm"] == together["metrics"]["train/grad_norm"] > 0.1
    assert alone["metrics"]["train/loss"] == together["metrics"]["train/loss"]
    for key in ("gradients", "weights"):
        assert any(is_mtp(name, layout, family) for name in together[key])
        own = {name: value for name, value in together[key].items() if not is_mtp(name, layout, family)}
        assert own.keys() == alone[key].keys()
        for name, value in own.items():
            np.testing.assert_array_equal(value, alone[key][name], err_msg=name)


@pytest.mark.parametrize("family", MODELS)
def test_gradients_are_those_of_float64(
    outcome: Callable[..., dict[str, Any]], folder_of: Callable[[str, str], Path], family: str
) -> None:
    found = outcome("one rank", COEFFICIENT, family=family)
    loss, expected = oracle(folder_of(family, "one rank"))
    assert found["metrics"]["mtp/loss"] == pytest.approx(loss, abs=1e-5)
    got = {name: value for name, value in found["gradients"].items() if is_mtp(name, "one rank", family)}
    assert got.keys() == expected.keys()
    # Gradients in `main_grad` are clipped in place like the policy's.
    scale = min(1.0, 0.1 / (found["metrics"]["train/grad_norm"] + 1e-6))
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], scale * value, atol=1e-6 * np.abs(value).max() + 1e-7, err_msg=name)
    assert max(np.abs(value).max() for value in expected.values()) > 1e-2


SPLIT = [
    *(("glm4_moe", parallel) for parallel in LAYOUTS if parallel not in ("one rank", "chunks")),
    ("deepseek_v3", "tensor"),
    ("qwen3_5_text", "pipeline"),
]


@pytest.mark.parametrize(("family", "layout"), SPLIT)
def test_gradients_do_not_depend_on_the_layout(
    outcome: Callable[..., dict[str, Any]], family: str, layout: str
) -> None:
    alone, other = (outcome(name, COEFFICIENT, family=family) for name in ("one rank", layout))
    assert other["metrics"]["mtp/loss"] == pytest.approx(alone["metrics"]["mtp/loss"], abs=1e-5)
    for name, value in alone["gradients"].items():
        np.testing.assert_allclose(other["gradients"][name], value, atol=2e-6, err_msg=name)


def test_recomputed_layers_have_the_same_gradients(outcome: Callable[..., dict[str, Any]]) -> None:
    plain, recomputed = outcome("one rank", COEFFICIENT), outcome("one rank", COEFFICIENT, "full")
    for name, value in plain["gradients"].items():
        np.testing.assert_array_equal(recomputed["gradients"][name], value, err_msg=name)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_exports_have_the_layers(
    outcome: Callable[..., dict[str, Any]], folder_of: Callable[[str, str], Path], family: str, layout: str
) -> None:
    """Before an update all bytes are those of the model's folder; later the copies follow the policy's tensors."""
    found = outcome(layout, COEFFICIENT, family=family)
    before, after = (
        {name: value for file in (found["out"] / when).glob("*.safetensors") for name, value in load_file(file).items()}
        for when in ("before", "after")
    )
    expected = load_file(folder_of(family, layout) / "model.safetensors")
    assert before.keys() == after.keys() == expected.keys()
    for name, value in expected.items():
        assert value.view(torch.uint8).equal(before[name].view(torch.uint8)), name
    if family.startswith("qwen"):
        assert not after["mtp.fc.weight"].equal(before["mtp.fc.weight"])
        return
    prefix = f"model.layers.{4 if layout == 'chunks' else MODELS[family]['num_layers']}."
    for copy, original in (
        ("embed_tokens.weight", "model.embed_tokens.weight"),
        ("shared_head.head.weight", "lm_head.weight"),
    ):
        assert after[prefix + copy].equal(after[original]) and not after[original].equal(before[original])
    assert not after[prefix + "eh_proj.weight"].equal(before[prefix + "eh_proj.weight"])


def soft_oracle(folder: Path) -> tuple[float, dict[str, np.ndarray]]:
    """The mean KL from the policy's distribution at t + 1 to the layer's at t, and its gradients in float64."""
    layer = MtpOracle(folder, torch.float64)
    total, losses = torch.zeros((), dtype=torch.float64), []
    for sequence in make_sequences():
        tokens = torch.from_numpy(sequence.token_ids)
        logprobs = layer.predicted(tokens).log_softmax(-1)
        with torch.no_grad():
            policy = layer.model(tokens[None]).logits[0].log_softmax(-1)
        assert sequence.token_weights is not None
        for place in range(2, len(tokens)):
            if sequence.loss_mask[place]:
                loss = (policy[place - 1].exp() * (policy[place - 1] - logprobs[place - 2])).sum()
                total = total + COEFFICIENT * float(sequence.token_weights[place]) * loss
                losses.append(loss.item())
    total.backward()
    return float(np.mean(losses)), {name: value.numpy() for name, value in layer.gradients().items()}


SOFT = [
    ("glm4_moe", "one rank"), ("glm4_moe", "tensor"), ("glm4_moe", "pipeline"), ("glm4_moe", "context"),
    ("qwen3_5_text", "one rank"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "layout"), SOFT)
def test_the_layer_learns_the_policys_distribution(
    ranks: RankPool, outcome: Callable[..., dict[str, Any]], folder_of: Callable[[str, str], Path],
    family: str, layout: str,
) -> None:  # fmt: skip
    """Loss and gradient are those of float64 in each layout, and the policy's gradient is that without the layer."""
    folder = folder_of(family, layout)
    parallel = replace(ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1), **LAYOUTS[layout])
    recipe = recipe_of(folder, COEFFICIENT, mtp_targets="distribution")
    parts = ranks.run(updated, recipe, parallel, None, world_size=parallel.world_size)
    metrics, gradients = values(merge(part["metrics"] for part in parts)), join([part["gradients"] for part in parts])
    loss, expected = soft_oracle(folder)
    assert metrics["mtp/loss"] == pytest.approx(loss, abs=1e-5) and loss > 0.01
    scale = min(1.0, 0.1 / (metrics["train/grad_norm"] + 1e-6))
    for name, value in expected.items():
        limit = 1e-5 * np.abs(value).max() + 1e-7
        np.testing.assert_allclose(gradients[name], scale * value, atol=limit, rtol=0, err_msg=name)
    alone = outcome(layout, None, family=family)
    for name, value in alone["gradients"].items():
        np.testing.assert_array_equal(gradients[name], value, err_msg=name)
