"""Muon over sharded matrices: for equal gradients, every layout makes bit-equal steps."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.families.tensors.rules import Rule
from megarl.planner.memory.trainer_bytes import MATRIX_BUCKET_BYTES, trainer_states, whole_matrix_bytes
from megarl.reshard.boxes import Piece, cut_piece, dense_piece
from megarl.training.muon.exchange import BUCKET_BYTES
from megarl.training.muon.owners import assign_owners, plan_rounds
from tests.algorithms.test_muon import by_singular_values
from tests.rank_pool import RankPool
from tests.training.invariance import cut_out, join
from tests.training.state.test_checkpoint import Sizes, build, layouts_of, parallel_of, recipe_of
from tests.training.state.test_state_copies import copied, restored, whole

MUON = {"name": "muon", "learning_rate": 0.03, "clip_grad_norm": 0.0, "schedule": "constant", "warmup_steps": 0}
FLOAT32 = {**MUON, "muon": {"products": "float32"}}
SMALL = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48}
EXPERTS_OF_16 = {"num_experts": 4, "experts_per_token": 2, "expert_intermediate_size": 16}
EXPERTS = {"family": "qwen3_moe", **EXPERTS_OF_16}


def test_owners_have_about_equal_work() -> None:
    costs = {f"m{number}": number * number for number in range(1, 30)}
    owners = assign_owners(costs, {name: {0, 1, 2, 3} for name in costs}, 4)
    loads = [sum(costs[name] for name, owner in owners.items() if owner == rank) for rank in range(4)]
    assert max(loads) - min(loads) < 0.1 * sum(loads) / 4


def test_a_matrix_stays_where_it_is_unless_another_rank_has_much_less_to_do() -> None:
    costs = dict.fromkeys("abcdef", 10)
    spread = {name: {place % 3} for place, name in enumerate(costs)}
    assert assign_owners(costs, spread, 3) == {name: place % 3 for place, name in enumerate(costs)}
    owners = list(assign_owners(costs, {name: {0} for name in costs}, 3).values())
    assert sorted(owners.count(rank) for rank in range(3)) == [1, 2, 3]


def test_a_round_has_no_more_than_the_largest_matrix() -> None:
    shapes = {"a": (10, 10), "b": (5, 10), "c": (5, 10), "d": (9, 9), "e": (1, 19)}
    rounds = plan_rounds(dict(a=0, b=1, c=1, d=0, e=0), shapes)
    assert rounds == [{0: ["a"], 1: ["b", "c"]}, {0: ["d", "e"]}]
    assert plan_rounds({}, {}) == []


def test_parts_of_a_piece_are_its_elements_in_a_range() -> None:
    values = np.arange(100)
    piece = replace(dense_piece("w", (4, 5), "s", 7), box=replace(dense_piece("w", (6, 5), "s", 0).box, start=(2, 0)))
    for start in range(0, 40, 3):
        for stop in range(start, 40, 2):
            parts = list(cut_piece(piece, start, stop))
            places = np.concatenate([cut_values(part, values) for part in parts] or [np.zeros(0, int)])
            assert places.tolist() == [place for place in range(7, 27) if start <= place < stop]
            assert all(part.box.start[0] >= 2 for part in parts)
    with pytest.raises(ValueError, match="w: "):
        list(cut_piece(replace(piece, strides=(6, 1)), 0, 100))


def cut_values(piece: Piece, values: np.ndarray) -> np.ndarray:
    itemsize = values.itemsize
    return np.lib.stride_tricks.as_strided(
        values[piece.offset :], piece.box.shape, [stride * itemsize for stride in piece.strides]
    ).ravel()


def gradient_of(name: str, shape: tuple[int, ...], step: int) -> np.ndarray:
    """A gradient that is a function of the tensor's name and the step: low rank plus noise."""
    random = np.random.default_rng([zlib.crc32(name.encode()), step])
    values = random.normal(size=shape) * 0.1
    if len(shape) == 2:
        values += np.outer(random.normal(size=shape[0]), random.normal(size=shape[1]))
    return values.astype(np.float32)


def step_with_given_gradients(recipe: Recipe, parallel: ParallelConfig, num_steps: int) -> Any:
    """This rank's parts of the weights before and after steps with given gradients, and the optimizer's bytes."""
    from megarl.families.model_tensors import hf_tensors
    from megarl.training.optimizer import step_if_finite

    engine = build(recipe, parallel)
    layouts = layouts_of(recipe, parallel)
    pieces = [piece for piece in layouts[dist.get_rank()] if piece.storage in engine.parameters]
    shapes = hf_tensors(layouts.model)
    before = cut_out(pieces, engine.parameters)
    for step in range(num_steps):
        engine.schedule.step(increment=1)
        for parameter in engine.parameters.values():
            parameter.main_grad.zero_()
        for piece in pieces:
            part = gradient_of(piece.box.name, shapes[piece.box.name], step)[
                tuple(slice(a, b) for a, b in zip(piece.box.start, piece.box.stop, strict=True))
            ]
            flat = engine.parameters[piece.storage].main_grad.view(-1)
            flat.as_strided(piece.box.shape, piece.strides, flat.storage_offset() + piece.offset).copy_(
                torch.from_numpy(part.copy())
            )
        assert step_if_finite(engine.optimizer, is_allowed=True)[1]
    num_bytes = sum(tensor.nbytes for tensor in engine._optimizer_state())
    return before, cut_out(pieces, engine.parameters), num_bytes


def steps(
    ranks: RankPool, recipe: Recipe, num_steps: int = 3, **sizes: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    parallel = replace(ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1), **sizes)
    results = ranks.run(step_with_given_gradients, recipe, parallel, num_steps, world_size=parallel.world_size)
    return join([before for before, _, _ in results]), join([after for _, after, _ in results])


Layout = tuple[dict[str, int], bool]
"""Parallel sizes, and whether data-parallel ranks share the optimizer's state."""


@pytest.mark.parametrize(
    ("shape", "layouts"),
    [
        pytest.param({}, [({"tp": 2, "dp": 2}, True), ({"tp": 2}, False)], id="dense"),
        pytest.param(
            {},
            [({"dp": 2}, True), ({"dp": 4}, True), ({"tp": 2}, True), ({"pp": 2, "dp": 2}, True), ({"dp": 2}, False),
             ({"cp": 2}, True), ({"tp": 2, "dp": 2}, False), ({"pp": 2, "vpp": 1, "tp": 2}, True)],
            id="dense, all layouts", marks=pytest.mark.long,
        ),
        pytest.param(
            EXPERTS,
            [({"ep": 2, "dp": 2}, True), ({"tp": 2, "etp": 2}, True), ({"etp": 2, "dp": 2}, False),
             ({"tp": 2, "ep": 2, "dp": 2}, True), ({"pp": 2, "dp": 2, "ep": 2}, True), ({"dp": 4}, True)],
            id="experts", marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_every_layout_makes_the_same_steps(
    ranks: RankPool, tiny_model: Callable[..., Path], shape: dict[str, Any], layouts: list[Layout]
) -> None:
    """Bit for bit, in float32, and as the definition in float64 says."""
    model = tiny_model(num_layers=2, **SMALL, **shape)
    recipe = recipe_of(model, optimizer=FLOAT32)
    before, expected = steps(ranks, recipe)
    check_definition(before, expected)
    for sizes, distributed in layouts:
        recipe = recipe_of(model, optimizer=FLOAT32, distributed_optimizer=distributed)
        _, after = steps(ranks, recipe, **sizes)
        assert after.keys() == expected.keys()
        unequal = [name for name in expected if not np.array_equal(after[name], expected[name])]
        assert not unequal, (sizes, distributed, unequal)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("gpt_oss", EXPERTS_OF_16),
        ("deepseek_v3", EXPERTS_OF_16),
        ("glm4_moe", {**EXPERTS_OF_16, "num_mtp_layers": 1}),
        ("qwen3_5_moe", EXPERTS_OF_16),
        ("qwen3_next", EXPERTS_OF_16),
        ("qwen2_moe", EXPERTS_OF_16),
        ("seed_oss", {}),
    ],
)
def test_matrices_of_every_family_make_the_same_steps(
    ranks: RankPool, tiny_model: Callable[..., Path], family: str, shape: dict[str, Any]
) -> None:
    model = tiny_model(family=family, **{**SMALL, "hidden_size": 64, "num_layers": 4}, **shape)
    further = {"mtp_loss_coefficient": 0.2} if "num_mtp_layers" in shape else {}
    _, expected = steps(ranks, recipe_of(model, optimizer=FLOAT32, **further), 2)
    for sizes in ({"tp": 2}, {"dp": 2}):
        _, after = steps(ranks, recipe_of(model, optimizer=FLOAT32, **further), 2, **sizes)
        unequal = [name for name in expected if not np.array_equal(after[name], expected[name])]
        assert not unequal, (sizes, unequal)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("distributed", [True, False])
def test_the_state_has_the_planned_bytes(
    ranks: RankPool, tiny_model: Callable[..., Path], dtype: str, distributed: bool
) -> None:
    """Main weights and momentum of a matrix: 8 bytes an element in bfloat16. The vocabulary has no padding."""
    model = tiny_model(num_layers=1, vocab_size=448, **SMALL)
    recipe = recipe_of(model, optimizer=MUON, dtype=dtype, distributed_optimizer=distributed)
    parallel = ParallelConfig(tp=1, pp=1, dp=2, rollout_tp=1)
    results = ranks.run(step_with_given_gradients, recipe, parallel, 1, world_size=2)
    layouts = layouts_of(recipe, parallel)
    for rank, (_, _, num_bytes) in enumerate(results):
        planned = trainer_states(
            layouts, rank, itemsize=2 if dtype == "bfloat16" else 4, is_distributed=distributed, optimizer="muon",
            is_pinned=False,
        )  # fmt: skip
        assert num_bytes == planned.main_weights + planned.moments


def test_the_memory_of_whole_matrices_is_planned() -> None:
    """A 4 x 6 matrix in float32; while it arrives twice that in staging, then a normalised copy and operands."""
    assert MATRIX_BUCKET_BYTES == BUCKET_BYTES
    rule = Rule("linear.weight", "every_layer", (("w", (4, 6)),), None, ())
    layouts: Any = SimpleNamespace(rules=(rule,))
    assert whole_matrix_bytes(layouts, product_bytes=2) == 4 * 24 + max(8 * 24, (4 + 2) * 24, 2 * (2 * 24 + 2 * 16))
    assert whole_matrix_bytes(layouts, product_bytes=4) == 4 * 24 + 4 * (2 * 24 + 2 * 16)
    layouts.rules = (replace(rule, tensors=(("w", (1 << 14, 1 << 13)),)),)
    assert whole_matrix_bytes(layouts, product_bytes=2) == (1 << 27) * (4 + 6)


@pytest.mark.parametrize(("before", "after"), [((1, 1, 2), (2, 1, 1)), ((2, 1, 1), (1, 1, 4))])
def test_a_state_has_other_sizes_after_a_resize_and_the_same_values(
    ranks: RankPool, tiny_model: Callable[..., Path], before: Sizes, after: Sizes
) -> None:
    recipe = recipe_of(tiny_model(num_layers=1, **SMALL), optimizer=MUON)
    first = ranks.run(copied, recipe, parallel_of(before), world_size=parallel_of(before).world_size)
    contents = [files for files, _ in first]
    then = ranks.run(restored, recipe, parallel_of(after), contents, world_size=parallel_of(after).world_size)
    expected, found = whole([parts for _, parts in first]), whole([parts for _, parts in then])
    assert expected.keys() == found.keys()
    assert {name.split(".")[2] for name in found if name.startswith("optimizer.")} == {
        "param", "exp_avg", "exp_avg_sq", "momentum_buffer",
    }  # fmt: skip
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def check_definition(before: dict[str, np.ndarray], after: dict[str, np.ndarray], num_steps: int = 3) -> None:
    matrices = [
        name for name, value in before.items() if value.ndim == 2 and "embed" not in name and "head" not in name
    ]
    matrices = [name for name in matrices if not name.endswith("mlp.gate.weight")]
    assert len(matrices) in (2 * 7, 2 * (4 + 3 * 4))
    for name in matrices:
        weight, momentum = before[name].astype(np.float64), np.zeros(before[name].shape)
        for step in range(num_steps):
            momentum = 0.95 * momentum + 0.05 * gradient_of(name, weight.shape, step)
            update = 0.2 * math.sqrt(max(weight.shape)) * by_singular_values(momentum, "quintic")
            weight = (1 - 0.03 * 0.1) * weight - 0.03 * update
        assert np.abs(after[name] - weight).max() < 1e-5, name
