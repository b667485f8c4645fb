"""Copies of a training state in host memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.testing import RankPool
from megarl.training.state_copies import partners
from tests.training.test_checkpoint import build, layout_of, recipe_of, update


def copy_and_restore(recipe: Any) -> tuple[bool, bool, dict[str, Any], str]:
    """Copy the state, train on, restore it. Returns whether training changed it, whether the copy is bit-equal, the
    driver's values, and the error about a flipped bit.
    """
    from megarl.training.state_copies import StateCopier, StateCopies, restore
    from megarl.training.state_parts import state_parts
    from megarl.types import DataError

    def state() -> dict[tuple[str, tuple[int, ...]], bytes]:
        # All parts: without the distributed optimizer, only one rank's are the main ones.
        return {(part.name, part.start): part.values.numpy().tobytes() for part in state_parts(models)}

    layout, topology = layout_of((1, 1, 2)), [("a",), ("b",)]
    engine, copies = build(recipe, layout), StateCopies()
    models = {"": engine}
    update(engine, layout, 0)
    before, copier = state(), StateCopier(copies, topology)
    for step in (1, 2):
        copier.begin(step, models, str(layout), weight_version=step)
        assert copier.finish(wait=True)
    update(engine, layout, 1)
    has_changed = state() != before
    driver, _ = restore(copies, 2, models, str(layout), topology)
    is_equal = state() == before
    copy = next(copy for (step, _), copy in copies.held.items() if step == 2 and copy.blocks)
    copy.blocks["float32"][3] ^= 1
    try:
        restore(copies, 2, models, str(layout), topology)
    except DataError as error:
        return has_changed, is_equal, driver, str(error)
    return has_changed, is_equal, driver, ""


@pytest.mark.parametrize("distributed", [True, False])
def test_a_state_is_restored_bit_for_bit(ranks: RankPool, tiny_model: Callable[..., Path], distributed: bool) -> None:
    recipe = recipe_of(tiny_model(num_layers=2), distributed_optimizer=distributed)
    for has_changed, is_equal, driver, error in ranks.run(copy_and_restore, recipe, world_size=2):
        assert has_changed and is_equal
        assert driver == {"weight_version": 2} and "state after step 2 has the checksum" in error


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [("a", [0]), ("aa", [1, 0]), ("aabb", [2, 3, 0, 1]), ("aabbcc", [2, 3, 4, 5, 0, 1]), ("aab", [2, 2, 0])],
)
def test_a_copy_goes_to_another_node(nodes: str, expected: list[int]) -> None:
    assert partners([(node,) for node in nodes]) == expected
