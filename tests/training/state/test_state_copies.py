"""Copies of a training state in host memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config.parallel import ParallelConfig
from megarl.families.shape import read_model_shape
from megarl.reshard.forecast.resize import StateSettings, forecast_resize
from tests.rank_pool import RankPool
from tests.training.state.test_checkpoint import Sizes, build, parallel_of, recipe_of, update


def copy_and_restore(recipe: Any) -> tuple[bool, bool, dict[str, Any]]:
    """Copy the state, train on, restore it. Returns whether training changed it, whether the copy is bit-equal, and
    the driver's values.
    """
    from megarl.training.state.copies import StateCopier, open_copies, restore_from_copies
    from megarl.training.state.parts import state_parts

    def state() -> dict[tuple[str, tuple[int, ...]], bytes]:
        # All parts: without the distributed optimizer, only one rank's are the main ones.
        return {(part.name, part.start): part.values.numpy().tobytes() for part in state_parts(models)}

    parallel, topology = parallel_of((1, 1, 2)), [("a",), ("b",)]
    engine = build(recipe, parallel)
    models = {"": engine}
    update(engine, parallel, 0)
    before, copier = state(), StateCopier(topology)
    for step in (1, 2):
        copier.begin_copies(step, models, str(parallel), weight_version=step)
        files = copier.finish_copies(wait=True)
    assert files is not None and copier.finish_copies(wait=False) is files
    update(engine, parallel, 1)
    has_changed = state() != before
    # Each rank has both copies: its own, and its partner's.
    copies = open_copies(files)
    assert sorted(copy.origin for copy in copies) == [0, 1] and {copy.step for copy in copies} == {2}
    driver, _ = restore_from_copies(copies, models, str(parallel), topology)
    return has_changed, state() == before, driver


@pytest.mark.parametrize(("optimizer", "distributed"), [("adam", True), ("adam", False), ("muon", True)])
def test_a_state_is_restored_bit_for_bit(
    ranks: RankPool, tiny_model: Callable[..., Path], optimizer: str, distributed: bool
) -> None:
    recipe = recipe_of(tiny_model(num_layers=2), {"name": optimizer}, distributed_optimizer=distributed)
    for has_changed, is_equal, driver in ranks.run(copy_and_restore, recipe, world_size=2):
        assert has_changed and is_equal
        assert driver == {"weight_version": 2}


def copied(recipe: Any, parallel: ParallelConfig) -> tuple[dict[str, bytes], list[Any]]:
    """Train, and copy the state. Returns the contents of the files by name, and the parts of the state."""
    from megarl.training.state.copies import StateCopier

    engine = build(recipe, parallel)
    update(engine, parallel, 0)
    copier = StateCopier([("a",)] * parallel.world_size)
    copier.begin_copies(1, {"": engine}, str(parallel))
    files = copier.finish_copies(wait=True)
    assert files is not None
    return {name: Path(fields["path"]).read_bytes() for name, fields in files.items()}, parts_of(engine)


def restored(recipe: Any, parallel: ParallelConfig, contents: list[dict[str, bytes]]) -> tuple[int, list[Any]]:
    """Restore the state of a run with other sizes. Returns the bytes received, and the parts of the state.

    `contents` are the contents of the files of each earlier rank.
    """
    from megarl.training.state.copies import _make_file, open_copies, restore_from_copies

    engine = build(recipe, parallel)
    files = {name: _make_file(data) for of_rank in contents for name, data in of_rank.items()}
    opened = open_copies({name: {"path": file.path, "size": file.num_bytes} for name, file in files.items()})
    _, received = restore_from_copies(opened, {"": engine}, str(parallel), [("a",)] * parallel.world_size)
    return received, parts_of(engine)


def parts_of(engine: Any) -> list[Any]:
    from megarl.training.state.parts import state_parts

    return [(part.name, part.start, part.values.numpy().copy()) for part in state_parts({"": engine})]


def whole(parts: list[list[Any]]) -> dict[str, np.ndarray]:
    """Return the full tensors of a state from the parts on all ranks."""
    every = [part for of_rank in parts for part in of_rank]
    shapes: dict[str, tuple[int, ...]] = {}
    for name, start, values in every:
        stop = tuple(a + n for a, n in zip(start, values.shape, strict=False))
        shapes[name] = tuple(map(max, shapes.get(name, stop), stop))
    found = {name: np.full(shape, np.nan) for name, shape in shapes.items()}
    for name, start, values in every:
        place = tuple(slice(a, a + n) for a, n in zip(start, values.shape, strict=False))
        found[name][place] = values
    return found


@pytest.mark.parametrize(
    ("before", "after", "shape"),
    [
        pytest.param((1, 1, 1), (1, 1, 2), {}, id="dp 1 to 2"),
        pytest.param((1, 1, 2), (2, 1, 1), {}, id="dp 2 to tp 2"),
        pytest.param((1, 2, 1), (1, 1, 2), {}, id="pp 2 to dp 2"),
        pytest.param((2, 1, 1), (1, 2, 1), {"tie_word_embeddings": False}, id="tp 2 to pp 2"),
        pytest.param((1, 2, 2), (2, 2, 1), {"tie_word_embeddings": True}, id="tied, dp 2 pp 2 to tp 2 pp 2"),
        pytest.param((1, 1, 2), (2, 2, 1), {"family": "qwen3_moe"}, id="experts, dp 2 to tp 2 pp 2"),
    ],
)
@pytest.mark.parametrize("distributed", [True, False])
def test_a_resize_moves_about_the_bytes_that_were_predicted(
    ranks: RankPool,
    tiny_model: Callable[..., Path],
    before: Sizes,
    after: Sizes,
    shape: dict[str, Any],
    distributed: bool,
) -> None:
    """On one node none move: each rank reads what it needs. The values are equal, bit for bit."""
    recipe = recipe_of(tiny_model(num_layers=2, **shape), distributed_optimizer=distributed)
    old, new = parallel_of(before), parallel_of(after)
    first = ranks.run(copied, recipe, old, world_size=old.world_size)
    then = ranks.run(restored, recipe, new, [contents for contents, _ in first], world_size=new.world_size)
    expected, found = whole([parts for _, parts in first]), whole([parts for _, parts in then])
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    settings = StateSettings(4, distributed)
    moves = forecast_resize(read_model_shape(recipe.model.path), old, new, settings, (8, 8))
    assert sum(received for received, _ in then) == moves.received == moves.handed_over == 0
    assert moves.ratio == 1.0
