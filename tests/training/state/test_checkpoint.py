"""The trainer's state on disk: bit-equal where the layout is the same, the same next step where it is another."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megarl.checkpoint.convert import to_hf
from megarl.checkpoint.drafter_files import convert_drafter
from megarl.checkpoint.torch_dist_reader import check_harmless
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.packing import pack
from megarl.families.shape import padded_vocab_size, read_model_shape
from megarl.reshard.layouts.megatron import MegatronLayouts, megatron_layouts
from megarl.tracking.metrics import merge, values
from megarl.types import DiskFullError, TrainingSequence
from tests.checkpoint.model_folders import assert_equal_bits, tensors_of
from tests.models.drafts.eagle3 import make_eagle3
from tests.rank_pool import RankPool
from tests.token_batches import row_batches, weighed

Sizes = tuple[int, int, int]


def recipe_of(model: Path, optimizer: Mapping[str, Any] = {}, **trainer: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "checkpoint",
            "loop": "sft",
            "model": {"path": str(model), "dtype": trainer.pop("dtype", "float32")},
            "data": {"train": "unused"},
            "trainer": {"max_tokens_per_microbatch": 64, **trainer},
            "optimizer": {
                "learning_rate": 3e-3,
                "weight_decay": 0.1,
                "schedule": "cosine",
                "warmup_steps": 2,
                **optimizer,
            },
            "train": {"steps": 8},
        }
    )


def parallel_of(sizes: Sizes) -> ParallelConfig:
    tp, pp, dp = sizes
    return ParallelConfig(tp, pp, dp, 1)


def layouts_of(recipe: Recipe, parallel: ParallelConfig) -> MegatronLayouts:
    from megarl.models.configuration import uses_transformer_engine

    shape = read_model_shape(recipe.model.path).with_draft_layers(recipe.trainer.trains_draft_layers)
    return megatron_layouts(
        shape,
        parallel,
        padded_vocab_size=padded_vocab_size(shape.vocab_size, parallel.tp),
        transformer_engine=uses_transformer_engine(),
    )


def build(recipe: Recipe, parallel: ParallelConfig) -> Any:
    from megarl.checkpoint import safetensors
    from megarl.training.training_engine import TrainingEngine

    layouts = layouts_of(recipe, parallel)
    shape, pieces = layouts.model, layouts[dist.get_rank()]

    def load(parameters: Mapping[str, torch.Tensor]) -> None:
        safetensors.load(recipe.model.path, pieces, parameters, with_draft_layers=recipe.trainer.trains_draft_layers)

    return TrainingEngine(recipe, parallel, shape, load)


def update(engine: Any, parallel: ParallelConfig, step: int) -> dict[str, Any]:
    """One step on tokens that are a function of the step."""
    numbers = np.random.default_rng(step)
    sequences = weighed(
        [
            TrainingSequence(numbers.integers(1, 400, size=length), np.arange(length) >= 2)
            for length in (5, 9, 14, 11, 7, 8, 16, 4)
        ],
        engine.recipe.algorithm,
    )
    tokens = engine.recipe.trainer.max_tokens_per_microbatch
    rows = pack([len(s) for s in sequences], max_tokens=tokens, num_ranks=parallel.dp, multiple=parallel.tp)
    return engine.update(row_batches(sequences, rows[parallel.coordinates(dist.get_rank()).dp])).metrics


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    """Copies of this rank's parameters, master weights and moments."""
    state = {name: value.detach().clone() for name, value in engine.parameters.items()}
    for number, leaf in enumerate(getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])):
        order = [parameter for group in leaf.optimizer.param_groups for parameter in group["params"]]
        for place, parameter in enumerate(order):
            state[f"{number}.{place}"] = parameter.detach().clone()
            for name, value in leaf.optimizer.state[parameter].items():
                state[f"{number}.{place}.{name}"] = torch.as_tensor(value).clone()
    return state


def draw() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


def save_and_go_on(
    recipe: Recipe, sizes: Sizes, folder: Path, asynchronous: bool, exported: Path | None = None
) -> dict[str, Any]:
    """Two steps, a save, the state then, two more steps; a save under way must not see what these change.

    `exported` is a folder for the model as it is saved.
    """
    from megarl.checkpoint import safetensors
    from megarl.training.state import checkpoint

    parallel = parallel_of(sizes)
    engine = build(recipe, parallel)
    for step in range(2):
        update(engine, parallel, step)
    if exported is not None:
        layouts = layouts_of(recipe, parallel)
        safetensors.export(
            exported, recipe.model.path, layouts.model, layouts, dist.get_rank(), engine.tensors,
            dtype=torch.float32, bucket_bytes=1 << 16,
        )  # fmt: skip
    random.seed(5 + dist.get_rank())
    save = checkpoint.plan_save(folder, {"": engine}, str(parallel), weight_version=3)
    assert save.num_bytes > 3 * 4 * sum(p.numel() for p in engine.parameters.values())
    result = {"state": state_of(engine)}
    save.write(asynchronous=asynchronous)
    if asynchronous:
        with torch.no_grad():
            for parameter in engine.parameters.values():
                parameter.fill_(7)
        save.finish()
        for name, parameter in engine.parameters.items():
            parameter.data.copy_(result["state"][name])
    else:
        assert save.finish(wait=False)
    result["drawn"] = draw()
    result["metrics"] = [update(engine, parallel, step) for step in (2, 3)]
    result["end"] = state_of(engine)
    return result


def load_and_go_on(recipe: Recipe, sizes: Sizes, folder: Path) -> dict[str, Any]:
    from megarl.training.state import checkpoint

    parallel = parallel_of(sizes)
    engine = build(recipe, parallel)
    with torch.no_grad():
        for parameter in engine.parameters.values():
            parameter.fill_(7)
    result: dict[str, Any] = {
        "driver": checkpoint.restore_models(folder, {"": engine}, str(parallel)),
        "state": state_of(engine),
    }
    result["drawn"] = draw()
    result["metrics"] = [update(engine, parallel, step) for step in (2, 3)]
    result["end"] = state_of(engine)
    return result


def assert_equal(mine: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert mine.keys() == other.keys()
    for name in mine:
        assert mine[name].dtype == other[name].dtype and torch.equal(mine[name], other[name]), name


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> Callable[..., Path]:
    def make(**shape: Any) -> Path:
        sizes = {"hidden_size": 48, "num_layers": 2, "num_heads": 12, "num_kv_heads": 6, "intermediate_size": 48}
        return tiny_model(**(sizes | {"vocab_size": 431, "initializer_range": 0.15} | shape))

    return make


@pytest.mark.parametrize(
    ("sizes", "trainer", "asynchronous"),
    [
        pytest.param((1, 1, 2), {}, True, id="dp2"),
        pytest.param((1, 2, 1), {"dtype": "bfloat16"}, True, id="pp2 in bfloat16"),
        pytest.param((1, 1, 2), {"dtype": "bfloat16"}, False, id="dp2 in bfloat16, in place"),
        pytest.param((1, 2, 1), {"distributed_optimizer": False}, True, id="pp2, optimizer not distributed"),
        pytest.param((1, 1, 1), {"distributed_optimizer": False, "dtype": "bfloat16"}, True, id="master weights"),
        pytest.param((1, 1, 2), {"optimizer": {"name": "muon"}, "dtype": "bfloat16"}, True, id="dp2, Muon"),
        pytest.param((1, 1, 1), {"optimizer": {"name": "muon"}, "distributed_optimizer": False}, True, id="Muon"),
        pytest.param((1, 1, 2), {"optimizer_offload_fraction": 0.5, "dtype": "bfloat16"}, True, id="half on the host"),
    ],
)
def test_a_run_goes_on_bit_equal_at_the_same_layout(
    ranks: RankPool,
    model: Callable[..., Path],
    tmp_path: Path,
    sizes: Sizes,
    trainer: dict[str, Any],
    asynchronous: bool,
) -> None:
    recipe, world = recipe_of(model(), **trainer), parallel_of(sizes).world_size
    saved = ranks.run(save_and_go_on, recipe, sizes, tmp_path, asynchronous, world_size=world)
    check_harmless(tmp_path)
    loaded = ranks.run(load_and_go_on, recipe, sizes, tmp_path, world_size=world)
    for mine, other in zip(loaded, saved, strict=True):
        assert mine["driver"] == {"weight_version": 3}
        assert mine["drawn"] == other["drawn"]
        assert_equal(mine["state"], other["state"])
        assert mine["metrics"] == other["metrics"]
        assert_equal(mine["end"], other["end"])
    assert not torch.equal(loaded[0]["end"]["0.0"], loaded[0]["state"]["0.0"])


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("glm4_moe", (1, 2, 1)),
        pytest.param("deepseek_v3", (2, 1, 1), marks=pytest.mark.long),
        pytest.param("qwen3_5_moe", (1, 1, 2), marks=pytest.mark.long),
    ],
)
def test_layers_for_multi_token_prediction_go_on_and_are_converted(
    ranks: RankPool, tiny_model: Callable[..., Path], tmp_path: Path, family: str, sizes: Sizes
) -> None:
    """A resumed run is bit-equal to an unbroken one. The checkpoint's conversion is bit-equal to an export."""
    shape = {"hidden_size": 64, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48}
    experts = {"num_experts": 8, "experts_per_token": 4, "expert_intermediate_size": 16}
    model = tiny_model(family=family, num_mtp_layers=1, initializer_range=0.15, **shape, **experts)
    recipe, world = recipe_of(model, mtp_loss_coefficient=0.2), parallel_of(sizes).world_size
    (tmp_path / "saved").mkdir()
    saved = ranks.run(save_and_go_on, recipe, sizes, tmp_path / "saved", True, tmp_path / "exported", world_size=world)
    loaded = ranks.run(load_and_go_on, recipe, sizes, tmp_path / "saved", world_size=world)
    for mine, other in zip(loaded, saved, strict=True):
        assert_equal(mine["state"], other["state"])
        assert mine["metrics"] == other["metrics"]
        assert_equal(mine["end"], other["end"])
    assert any("mtp/loss" in metrics for one in loaded for metrics in one["metrics"])
    to_hf(tmp_path / "saved", tmp_path / "hf", hf=model, verify=True)
    before, exported = tensors_of(model), tensors_of(tmp_path / "exported")
    assert_equal_bits(exported, tensors_of(tmp_path / "hf"))
    own = [name for name in exported if name.startswith(("mtp.", "model.layers.4."))]
    assert len(own) > 10 and any(not exported[name].equal(before[name]) for name in own)


@pytest.mark.parametrize(
    ("shape", "sizes", "others"),
    [
        pytest.param({"tie_word_embeddings": True}, (2, 1, 1), [(1, 2, 1), (3, 1, 1), (1, 2, 2)], id="tied"),
        pytest.param({"tie_word_embeddings": False}, (3, 1, 1), [(1, 1, 1), (2, 2, 1)], id="untied"),
        pytest.param({"tie_word_embeddings": False}, (1, 1, 3), [(2, 1, 1)], id="from ranges"),
        pytest.param({"family": "qwen3_moe"}, (1, 1, 2), [(2, 1, 1)], id="experts"),
    ],
)
def test_a_checkpoint_is_read_at_any_layout(
    ranks: RankPool,
    model: Callable[..., Path],
    tmp_path: Path,
    shape: dict[str, Any],
    sizes: Sizes,
    others: list[Sizes],
) -> None:
    """tp 3 pads 431 tokens to 576, the other sizes to 448."""
    recipe = recipe_of(model(**shape))
    saved = ranks.run(save_and_go_on, recipe, sizes, tmp_path, True, world_size=parallel_of(sizes).world_size)
    expected = [values(merge(rank["metrics"][step] for rank in saved)) for step in range(2)]
    for other in others:
        loaded = ranks.run(load_and_go_on, recipe, other, tmp_path, world_size=parallel_of(other).world_size)
        for step in range(2):
            found = values(merge(rank["metrics"][step] for rank in loaded))
            assert found == pytest.approx(expected[step], rel=1e-5), other


@pytest.mark.parametrize(("sizes", "other"), [((1, 1, 2), (1, 2, 1)), ((1, 2, 1), (2, 1, 1))])
def test_a_trained_drafter_goes_on_at_any_layout(
    ranks: RankPool, tiny_model: Callable[..., Path], tmp_path: Path, sizes: Sizes, other: Sizes
) -> None:
    """Bit-equal at the same layout, with its weights, main weights and moments. Only the last pipeline stage has it."""
    shape = {"hidden_size": 64, "num_layers": 8, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48}
    model = tiny_model(head_dim=16, **shape)
    (tmp_path / "saved").mkdir()
    plain = recipe_of(model, drafter_learning_rate=1e-2, drafter_steps=2).model_dump(exclude_unset=True)
    files = make_eagle3(tmp_path / "drafter", model)
    drafter = {"method": "eagle3", "model": str(files), "num_speculative_tokens": 2}
    plain["data"]["validation"] = {"held_out": "unused"}
    recipe = Recipe.model_validate(plain | {"rollout": {"vllm": {"speculative_config": drafter}}})
    saved = ranks.run(save_and_go_on, recipe, sizes, tmp_path / "saved", True, world_size=2)
    loaded = ranks.run(load_and_go_on, recipe, sizes, tmp_path / "saved", world_size=2)
    for rank, (mine, unbroken) in enumerate(zip(loaded, saved, strict=True)):
        has_drafter = any(name.startswith("drafter.") for name in mine["state"])
        assert has_drafter == (parallel_of(sizes).coordinates(rank).pp == sizes[1] - 1)
        assert_equal(mine["state"], unbroken["state"])
        assert mine["metrics"] == unbroken["metrics"]
        assert_equal(mine["end"], unbroken["end"])
    resized = ranks.run(load_and_go_on, recipe, other, tmp_path / "saved", world_size=2)
    for step in range(2):
        expected, found = (values(merge(rank["metrics"][step] for rank in part)) for part in (saved, resized))
        assert "drafter/loss" in expected
        assert found == pytest.approx(expected, rel=1e-5)
    convert_drafter(tmp_path / "saved", tmp_path / "converted", str(files), read_model_shape(model))
    before, converted = tensors_of(files), tensors_of(tmp_path / "converted")
    assert converted.keys() == before.keys()
    for name, tensor in converted.items():
        # The maps of the vocabulary are copied. The last rank is on the last stage.
        expected_tensor = before[name] if name in ("d2t", "t2d") else saved[-1]["state"][f"drafter.{name}"]
        assert torch.equal(tensor, expected_tensor), name


def build_frozen(recipe: Recipe, parallel: ParallelConfig, scale: float) -> Any:
    """A frozen model whose weights are the folder's, times a number."""
    from megarl.training.model import FrozenModel

    policy = build(recipe, parallel)
    reference = FrozenModel(recipe, parallel, policy.shape, lambda parameters: None)
    with torch.no_grad():
        for name, parameter in reference.parameters.items():
            parameter.copy_(policy.parameters[name] * scale)
    return policy, reference


def visits_of(reference: Any) -> list[None]:
    """Grows whenever a frozen model goes onto the device."""
    visits: list[None] = []
    on_device = reference.on_device

    @contextmanager
    def counted(**kwargs: Any) -> Iterator[None]:
        visits.append(None)
        with on_device(**kwargs):
            yield

    reference.on_device = counted
    return visits


def mixed(before: torch.Tensor, policy: torch.Tensor, share: float) -> torch.Tensor:
    return (share * policy.double() + (1 - share) * before.double()).to(before.dtype)


def move_and_save(recipe: Recipe, sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Return how far the moved parameters are from their formula, for the saved ones and this rank's probe."""
    from megarl.training.state import checkpoint

    parallel = parallel_of(sizes)
    policy, reference = build_frozen(recipe, parallel, 0.5)
    update(policy, parallel, 1)
    (folder / "unmoved").mkdir(exist_ok=True)
    checkpoint_of = {"": policy, "reference": reference}
    visits = visits_of(reference)
    with checkpoint.load_changed_models(checkpoint_of):
        save = checkpoint.plan_save(folder / "unmoved", checkpoint_of, str(parallel))
        save.write(asynchronous=False)
    save.finish()
    num_visits = [len(visits)]
    before = {name: value.detach().clone() for name, value in reference.parameters.items()}
    reference.move_towards(policy.parameters, 0.25)
    errors = [
        float((value - mixed(before[name], policy.parameters[name], 0.25)).abs().max())
        for name, value in reference.parameters.items()
    ]
    (folder / "moved").mkdir(exist_ok=True)
    with checkpoint.load_changed_models(checkpoint_of):
        save = checkpoint.plan_save(folder / "moved", checkpoint_of, str(parallel))
        save.write(asynchronous=True)
    num_visits.append(len(visits))
    saved = {name: value.detach().clone() for name, value in reference.parameters.items()}
    # A save under way must not see the next move.
    reference.move_towards(policy.parameters, 1.0)
    save.finish()
    is_policy = all(torch.equal(value, policy.parameters[name]) for name, value in reference.parameters.items())
    return {"before": before, "errors": errors, "saved": saved, "is_policy": is_policy, "visits": num_visits}


def load_moved(recipe: Recipe, sizes: Sizes, folder: Path) -> list[tuple[bool, int, dict[str, torch.Tensor]]]:
    """Read a reference from each folder. Returns whether it has moved, its visits so far, and its parameters."""
    from megarl.training.state import checkpoint

    parallel = parallel_of(sizes)
    policy, reference = build_frozen(recipe, parallel, 0.5)
    found, visits = [], visits_of(reference)
    for name in ("unmoved", "moved"):
        checkpoint.restore_models(folder / name, {"": policy, "reference": reference}, str(parallel))
        parameters = {key: value.detach().clone() for key, value in reference.parameters.items()}
        found.append((reference.has_moved, len(visits), parameters))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(1, 1, 2), (2, 1, 1)], ids=["dp2", "tp2"])
def test_a_reference_that_moved_is_saved_and_comes_back(
    ranks: RankPool, model: Callable[..., Path], tmp_path: Path, sizes: Sizes, dtype: str
) -> None:
    recipe = recipe_of(model(), dtype=dtype)
    saved = ranks.run(move_and_save, recipe, sizes, tmp_path, world_size=2)
    check_harmless(tmp_path / "moved")
    for of_rank, loaded in zip(saved, ranks.run(load_moved, recipe, sizes, tmp_path, world_size=2), strict=True):
        # Summed in float32, then rounded once.
        assert max(of_rank["errors"]) <= (1e-7 if dtype == "float32" else 2**-9) and of_rank["is_policy"]
        (has_moved, visits, unmoved), (has_moved_now, visits_now, moved) = loaded
        assert (has_moved, has_moved_now) == (False, True)
        # One that stays as it is is not brought onto the device.
        assert of_rank["visits"] == [visits, visits_now] == [0, 1]
        assert_equal(unmoved, of_rank["before"])
        assert_equal(moved, of_rank["saved"])


def save_in_vain(recipe: Recipe, folder: Path) -> tuple[str, int]:
    """Return the error that the rank gets, and how much it was going to write."""
    from megarl.training.state import checkpoint

    engine = build(recipe, parallel_of((1, 1, 1)))
    save = checkpoint.plan_save(folder, {"": engine}, "one rank")
    with pytest.raises(DiskFullError) as caught:
        save.write(asynchronous=True)
        save.finish()
    return str(caught.value), save.num_bytes


@pytest.mark.parametrize(("options", "is_tried"), [("size=256k", False), ("size=64m,nr_inodes=3", True)])
def test_a_full_disk_is_named_before_and_while_it_is_written_to(
    ranks: RankPool, model: Callable[..., Path], small_disk: Callable[[str], Path], options: str, is_tried: bool
) -> None:
    """The second disk has room for all bytes, but not for another file beside `common.pt`."""
    home = small_disk(options)
    (home / "partial").mkdir()
    ((told, num_bytes),) = ranks.run(save_in_vain, recipe_of(model()), home / "partial", world_size=1)
    status = os.statvfs(home)
    assert told.startswith(f"{home / 'partial'}: no room on its disk: {num_bytes} bytes needed, ")
    assert f"{status.f_bavail * status.f_frsize} free. Make room" in told
    assert (num_bytes < status.f_bavail * status.f_frsize) is is_tried
    assert sorted(path.name for path in (home / "partial").iterdir()) == ["common.pt"]
