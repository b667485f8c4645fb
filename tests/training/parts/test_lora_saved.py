"""Adapters that leave the trainer: merged, as a PEFT folder, in a checkpoint; and what they are before training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.reshard.reshard_report import MergeRounding
from megarl.types import TrainingSequence
from tests.checkpoint.model_folders import tensors_of
from tests.rank_pool import RankPool
from tests.token_batches import by_sequence, row_batches
from tests.training.parts.test_lora import DENSE, SETTINGS, base_of, build, lora_recipe, rows_of, trained
from tests.training.test_training_engine import make_updates

Updates = list[list[TrainingSequence]]


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Callable[..., Path]:
    return lambda **shape: tiny_model(**(SETTINGS | DENSE | shape))


def parallel_of(sizes: Mapping[str, int]) -> ParallelConfig:
    return ParallelConfig(**{"tp": 1, "pp": 1, "dp": 1, "rollout_tp": 1, **sizes})


def update(engine: Any, recipe: Recipe, parallel: ParallelConfig, sequences: list[TrainingSequence]) -> dict[str, Any]:
    return engine.update(row_batches(sequences, rows_of(recipe, parallel, sequences))).metrics


def export(recipe: Recipe, parallel: ParallelConfig, updates: Updates, folder: Path) -> tuple[Any, Any, bool]:
    """An update, then both folders; the rows of the first batch and their log-probs; whether the base stayed."""
    from megarl.checkpoint import peft, safetensors

    engine, layouts, cuts = build(recipe, parallel)
    base, rank = base_of(engine), dist.get_rank()
    update(engine, recipe, parallel, updates[0])
    settings: dict[str, Any] = {"dtype": torch.float32, "bucket_bytes": 1 << 12}
    with engine.merging():
        safetensors.export(
            folder / "hf", recipe.model.path, engine.shape, layouts, rank, engine.weights, **settings, shard_bytes=40000
        )
    tensors = engine.tensors
    assert not any(w.untyped_storage().nbytes() for n, w in engine.weights.items() if w is not tensors[n])
    is_stabilised = recipe.lora.rank_stabilised
    config = peft.adapter_config(
        cuts, recipe.model.path, alpha=recipe.lora.alpha, dropout=0.0, is_rank_stabilised=is_stabilised
    )
    peft.export(folder / "adapter", config, cuts, rank, engine.parameters, **settings)
    rows = rows_of(recipe, parallel, updates[0])
    logprobs = engine.forward(row_batches(updates[0], rows))
    return rows, logprobs, all(torch.equal(base[n], p) for n, p in base_of(engine).items())


def assert_same_logprobs(model: Any, sequences: list[TrainingSequence], results: list[Any]) -> None:
    """Compare the rows of every reporting rank with a transformers model in float64."""
    seen = set()
    for rows, logprobs, stayed in results:
        assert stayed
        for index, mine in by_sequence(sequences, rows, logprobs).items():
            tokens = torch.from_numpy(sequences[index].token_ids)
            theirs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            np.testing.assert_allclose(mine[1:], theirs.detach().numpy(), rtol=0, atol=2e-5)
            seen.add(index)
    assert len(seen) == len(sequences)


def assert_merged(exported: Path, source: Path, scale: float) -> None:
    """The merged folder is the base plus scale * B A of the adapter's folder, tensor by tensor."""
    base, merged, adapter = (tensors_of(folder) for folder in (source, exported / "hf", exported / "adapter"))
    assert base.keys() == merged.keys() and adapter
    for name, weight in base.items():
        a, b = (
            adapter.pop(f"base_model.model.{name.removesuffix('weight')}lora_{letter}.weight", None) for letter in "AB"
        )
        expected = weight if a is None or b is None else weight + scale * b @ a
        torch.testing.assert_close(merged[name], expected, rtol=0, atol=1e-6)
    assert not adapter, "adapters of no tensor"


@pytest.mark.parametrize(
    ("shape", "sizes", "lora"),
    [
        pytest.param({}, {"tp": 2, "pp": 2}, {}, id="qwen3 tp2 pp2"),
        pytest.param({"num_kv_heads": 1}, {"tp": 2}, {}, id="kv heads below tp"),
        pytest.param({"family": "llama"}, {"pp": 2, "vpp": 2}, {"targets": ["down_proj", "qkv_proj"]}, id="llama vpp2"),
        pytest.param({}, {}, {"rank": 4, "rank_stabilised": True}, id="rank-stabilised"),
        pytest.param({"family": "qwen2_moe"}, {"tp": 2, "etp": 2, "ep": 2, "dp": 2}, {}, id="qwen2_moe"),
    ],
)
def test_transformers_and_peft_compute_what_the_trainer_does(
    ranks: RankPool,
    folder: Callable[..., Path],
    tmp_path: Path,
    shape: dict[str, Any],
    sizes: dict[str, int],
    lora: dict[str, Any],
) -> None:
    from transformers import AutoModelForCausalLM

    recipe = lora_recipe(folder(**shape), lora=lora, loop="sft")
    updates = make_updates(recipe, 431)
    parallel = parallel_of(sizes)
    results = ranks.run(export, recipe, parallel, updates, tmp_path, world_size=parallel.world_size)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64, experts_implementation="eager")
    assert_same_logprobs(merged, updates[0], results)
    power = 0.5 if recipe.lora.rank_stabilised else 1.0
    assert_merged(tmp_path, Path(recipe.model.path), recipe.lora.alpha / recipe.lora.rank**power)
    if "moe" in shape.get("family", ""):
        return
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(recipe.model.path, dtype=torch.float64)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", autocast_adapter_dtype=False).double()
    assert_same_logprobs(adapted, updates[0], results)


def starting(recipe: Recipe, parallel: ParallelConfig, updates: Updates) -> dict[str, Any]:
    """Log-probs of a new model with and without its adapters, and whether merging changes a bit."""
    engine, _, _ = build(recipe, parallel, filled=False)
    rows = row_batches(updates[0], rows_of(recipe, parallel, updates[0]))
    with engine.merging():
        equal = all(torch.equal(engine.parameters[name], value) for name, value in engine.weights.items())
        others = sum(value is not engine.parameters[name] for name, value in engine.weights.items())
    return {"policy": engine.forward(rows), "reference": engine.forward_frozen(rows), "equal": equal, "merged": others}


def test_new_adapters_change_no_bit(ranks: RankPool, folder: Callable[..., Path]) -> None:
    recipe, parallel = lora_recipe(folder()), parallel_of({"tp": 2})
    updates = make_updates(recipe, 431)
    for result in ranks.run(starting, recipe, parallel, updates, world_size=2):
        assert result["equal"] and result["merged"] == 4 * 4
        for mine, theirs in zip(result["policy"] or (), result["reference"] or (), strict=True):
            assert np.array_equal(mine, theirs)


def merge_rounded(recipe: Recipe, parallel: ParallelConfig) -> tuple[Any, list[float]]:
    """The rounding of a merge as reported, and in float64: squared norms of error and update."""
    from megarl.models.lora import adapters_of

    engine, _, _ = build(recipe, parallel)
    for _, _, adapter in adapters_of(engine.chunks):
        adapter.b.data.mul_(1e-2)
    squares = [0.0, 0.0]
    with engine.merging():
        for name, merged in engine.weights.items():
            if (base := engine.tensors[name]) is merged or dist.get_rank() >= parallel.tp * parallel.pp:
                continue
            adapter = engine.tensors[name.removesuffix("weight") + "adapter.a"].double()
            update = recipe.lora.scale * (
                engine.tensors[name.removesuffix("weight") + "adapter.b"].double().flatten(0, -2) @ adapter
            )
            squares[0] += float((merged.double() - base.double() - update).square().sum())
            squares[1] += float(update.square().sum())
    return engine.rounding, squares


def test_the_share_lost_in_a_merge_is_exact_in_every_layout(ranks: RankPool, folder: Callable[..., Path]) -> None:
    from megarl.loops.reshard_schedule import reshard_metrics
    from megarl.reshard.reshard_report import ReshardReport

    recipe = lora_recipe(folder())
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": "bfloat16"})})
    for sizes in ({}, {"tp": 2, "dp": 2}):
        parallel = parallel_of(sizes)
        results = ranks.run(merge_rounded, recipe, parallel, world_size=parallel.world_size)
        [share] = reshard_metrics([ReshardReport(rounding=rounding) for rounding, _ in results]).values()
        error, update = (sum(column) for column in zip(*(squares for _, squares in results), strict=True))
        assert share == pytest.approx((error / update) ** 0.5, rel=1e-5)
        assert 0.05 < share < 1
        # Data-parallel copies are counted once.
        assert [rounding is not None for rounding, _ in results] == [n < parallel.tp for n in range(len(results))]
    assert reshard_metrics([ReshardReport(rounding=MergeRounding(0.0, 0.0))]) == {}


def shares_in_engine(recipe: Recipe, parallel: ParallelConfig, num_updates: int) -> dict[str, tuple[float, float]]:
    """Train, then compare the update with what an engine would have of it, merged or as an adapter.

    Returns the part of the update that is kept along itself, and the norm of the error relative to that of the update.
    """
    from megarl.training.parts.lora import LoraPart

    engine, _, _ = build(recipe, parallel, filled=False)
    for sequences in islice(cycle(make_updates(recipe, 431)), num_updates):
        update(engine, recipe, parallel, sequences)
    part = engine.find_part(LoraPart)
    sums: dict[str, list[float]] = {"merged": [0.0] * 3, "adapter": [0.0] * 3}
    with engine.merging(), part.scaled_adapters.valid():
        sent = part.scaled_adapters.weights
        for name, merged in engine.weights.items():
            if (base := engine.tensors[name]) is merged:
                continue
            adapter = name.removesuffix("weight") + "adapter."
            a, b = (engine.tensors[adapter + matrix].double() for matrix in "ab")
            whole = recipe.lora.scale * b.flatten(0, -2) @ a
            in_engine = {
                "merged": merged.double() - base.double(),
                "adapter": sent[adapter + "b"].double().flatten(0, -2) @ sent[adapter + "a"].double(),
            }
            for way, value in in_engine.items():
                parts = (value * whole, (value - whole) ** 2, whole**2)
                sums[way] = [total + float(part.sum()) for total, part in zip(sums[way], parts, strict=True)]
    return {way: (along / norm, (error / norm) ** 0.5) for way, (along, error, norm) in sums.items()}


@pytest.mark.parametrize(
    ("learning_rate", "least", "most"),
    [
        pytest.param(1e-6, 0.0, 0.1, id="1e-6"),
        pytest.param(1e-5, 0.0, 0.4, id="1e-5"),
        pytest.param(1e-4, 0.1, 1.0, id="1e-4", marks=pytest.mark.long),
    ],
)
def test_an_adapter_takes_the_whole_update_to_the_engine_and_a_merged_copy_a_part_of_it(
    ranks: RankPool, tiny_model: Callable[..., Path], learning_rate: float, least: float, most: float
) -> None:
    """In bfloat16, with weights of deviation 0.02. Prints the shares."""
    recipe = lora_recipe(tiny_model(**(SETTINGS | DENSE | {"initializer_range": 0.02})))
    optimizer = recipe.optimizer.model_copy(update={"learning_rate": learning_rate, "name": "adam"})
    model = recipe.model.model_copy(update={"dtype": "bfloat16"})
    recipe = recipe.model_copy(update={"model": model, "optimizer": optimizer})
    for num_updates in (1, 10):
        [shares] = ranks.run(shares_in_engine, recipe, parallel_of({}), num_updates, world_size=1)
        print(learning_rate, num_updates, shares)
        along, error = shares["merged"]
        assert least <= along <= most and error > 0.3
        along, error = shares["adapter"]
        assert along == pytest.approx(1, abs=1e-3) and error < 5e-3


def replaying(recipe: Recipe, parallel: ParallelConfig, sequences: list[TrainingSequence]) -> list[np.ndarray]:
    """Log-probs of the frozen model before and after a pass whose tokens went to the first experts."""
    from megarl.training.routed_experts import StoredExperts, make_route_feed

    engine, _, _ = build(recipe, parallel)
    numbers = np.tile(np.arange(engine.shape.top_k), (engine.shape.num_layers, 1)).astype(np.int16)
    batch = TokenBatch.from_sequences(sequences)
    held = StoredExperts(0, 1)
    handles = [held.store(np.tile(numbers, (length, 1, 1))) for length in batch.lengths]
    engine.feeds.append(make_route_feed(held, engine))
    routed = replace(batch, experts=np.array(handles))
    before = engine.forward_frozen([routed])
    policy = engine.forward([routed])
    later = routed.select(range(1, len(sequences)))
    return [*before, *engine.forward_frozen([later]), *policy, *engine.forward([batch])]


def test_the_frozen_model_chooses_its_experts_itself(ranks: RankPool, folder: Callable[..., Path]) -> None:
    recipe = lora_recipe(folder(family="qwen2_moe"), router_replay=True)
    sequences = make_updates(recipe, 431)[0][:4]
    (before, after, replayed, free), *_ = ranks.run(replaying, recipe, parallel_of({}), sequences, world_size=1)
    np.testing.assert_allclose(before[len(sequences[0]) :], after, rtol=0, atol=1e-5)
    assert not np.allclose(replayed, free, atol=1e-2)


@pytest.mark.parametrize("sequence_parallel", [True, pytest.param(False, marks=pytest.mark.long)])
def test_dropout_acts_in_updates_only(ranks: RankPool, folder: Callable[..., Path], sequence_parallel: bool) -> None:
    """That copies of a matrix stay equal on all ranks is checked where they are put together."""
    without, dropped, again = (
        trained(
            ranks, lora_recipe(folder(), lora={"dropout": p}, sequence_parallel=sequence_parallel), {"tp": 2, "dp": 2}
        )
        for p in (0.0, 0.4, 0.4)
    )
    assert all(np.array_equal(a, b) for a, b in zip(without["before"], dropped["before"], strict=True))
    assert without["metrics"][0]["train/grad_norm"] != pytest.approx(dropped["metrics"][0]["train/grad_norm"], rel=1e-2)
    assert dropped["metrics"] == again["metrics"]


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    state = {name: value.detach().clone() for name, value in engine.parameters.items()}
    for number, part in enumerate(engine.optimizer.chained_optimizers):
        for place, values in enumerate(part.optimizer.state.values()):
            state |= {f"{number}.{place}.{name}": torch.as_tensor(value).clone() for name, value in values.items()}
    return state


def save_and_go_on(recipe: Recipe, parallel: ParallelConfig, updates: Updates, folder: Path) -> dict[str, Any]:
    from megarl.training.state import checkpoint

    engine, _, _ = build(recipe, parallel)
    update(engine, recipe, parallel, updates[0])
    save = checkpoint.plan_save(folder, {"": engine}, str(parallel))
    save.write(asynchronous=False)
    assert save.finish()
    metrics = [update(engine, recipe, parallel, sequences) for sequences in updates[1:]]
    return {"metrics": metrics, "state": state_of(engine)}


def load_and_go_on(recipe: Recipe, parallel: ParallelConfig, updates: Updates, folder: Path) -> dict[str, Any]:
    from megarl.training.state import checkpoint

    engine, _, _ = build(recipe, parallel, filled=False)
    checkpoint.restore_models(folder, {"": engine}, str(parallel))
    metrics = [update(engine, recipe, parallel, sequences) for sequences in updates[1:]]
    return {"metrics": metrics, "state": state_of(engine)}


@pytest.mark.parametrize(
    ("shape", "saved", "loaded"),
    [
        pytest.param({}, {"tp": 2, "dp": 2}, {"pp": 2, "vpp": 2}, id="dense"),
        pytest.param(
            {"family": "qwen2_moe"},
            {"tp": 2, "etp": 2, "ep": 2, "dp": 2},
            {"pp": 2},
            id="experts",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_checkpoint_of_adapters_resumes(
    ranks: RankPool,
    folder: Callable[..., Path],
    tmp_path: Path,
    shape: dict[str, Any],
    saved: dict[str, int],
    loaded: dict[str, int],
) -> None:
    """Bit-equal in the same layout, dropout included; in another one, where nothing is dropped, the same updates."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from megarl.checkpoint.torch_dist_reader import check_harmless
    from megarl.tracking.metrics import merge, values

    for dropout, sizes in ((0.2, saved), (0.0, loaded)):
        recipe = lora_recipe(folder(**shape), loop="sft", lora={"dropout": dropout}, distributed_optimizer=True)
        updates, target = make_updates(recipe, 431), tmp_path / str(dropout)
        target.mkdir()
        run = parallel_of(saved)
        before = ranks.run(save_and_go_on, recipe, run, updates, target, world_size=run.world_size)
        check_harmless(target)
        again = parallel_of(sizes)
        after = ranks.run(load_and_go_on, recipe, again, updates, target, world_size=again.world_size)
        if sizes is saved:
            for mine, other in zip(before, after, strict=True):
                assert mine["state"].keys() == other["state"].keys()
                assert all(torch.equal(value, other["state"][name]) for name, value in mine["state"].items())
            stored = FileSystemReader(target).read_metadata().state_dict_metadata
            tensors = [name for name, kind in stored.items() if isinstance(kind, TensorStorageMetadata)]
            assert tensors and all(".adapter." in name for name in tensors)
        for first, second in zip(
            *(zip(*(r["metrics"] for r in rs), strict=True) for rs in (before, after)), strict=True
        ):
            mine, theirs = (values(merge([part for part in step if part])) for step in (first, second))
            assert mine == pytest.approx(theirs, rel=1e-4)
