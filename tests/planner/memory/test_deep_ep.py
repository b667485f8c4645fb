"""DeepEP's buffers by its own formula: the sizes are those that its csrc/config.hpp gave, compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config import Recipe
from megarl.planner.memory.deep_ep import deep_ep_bytes
from megarl.planner.memory.devices import GPU
from megarl.planner.memory.phases import memory_table
from megarl.planner.predictions import models_of
from megarl.planner.sizes import parallel_of
from megarl.preflight.model.model_sizes import check_experts

WORKSPACE, GRANULE = 32 << 20, 512 << 20


@pytest.mark.parametrize(
    ("num_ranks", "hidden_size", "within", "granules"),
    [
        (2, 2048, 31_498_752, 0),
        (8, 2048, 125_994_624, 0),
        (8, 4096, 209_880_704, 0),
        (16, 4096, 236_116_224, 1),  # 57,481,344 between nodes
        (32, 7168, 377_675_264, 1),
        (64, 4096, 236_120_064, 1),
        (128, 2048, 275_620_864, 1),  # 260,559,360 between nodes, 268,435,456 of NVSHMEM
        (160, 7168, 944_193_024, 3),  # 866,371,200
    ],
)
def test_sizes_in_bfloat16(num_ranks: int, hidden_size: int, within: int, granules: int) -> None:
    assert (
        deep_ep_bytes(hidden_size=hidden_size, itemsize=2, num_ranks=num_ranks)
        == within + WORKSPACE + granules * GRANULE
    )
    # A channel of one byte has room for two.
    assert (
        deep_ep_bytes(hidden_size=hidden_size, itemsize=1, num_ranks=num_ranks)
        == within + WORKSPACE + granules * GRANULE
    )


def test_half_the_multiprocessors_have_half_the_channels() -> None:
    whole, half = (
        deep_ep_bytes(hidden_size=4096, itemsize=2, num_ranks=8, num_sms=num_sms) - WORKSPACE for num_sms in (20, 10)
    )
    assert whole == pytest.approx(2 * half, abs=128)


@pytest.mark.parametrize(
    ("dispatcher", "ep", "size"), [("flex", 2, 11_182_592 + WORKSPACE), ("flex", 1, 0), ("alltoall", 2, None)]
)
def test_the_table_has_them(tiny_model: Callable[..., Path], dispatcher: str, ep: int, size: int | None) -> None:
    """Bytes for a hidden size of 64: 10 channels * 2 ranks * (5 * 4 + 256 * (64 * 2 + 2056)) bytes, aligned to 128."""
    recipe = _recipe(tiny_model, {"moe_dispatcher": dispatcher, "ep": ep})
    table = memory_table(recipe, models_of(recipe, parallel_of(recipe)), GPU)
    found = {use.device_bytes for phase in table.phases for use in phase.uses if use.kind == "DeepEP"}
    assert found == (set() if size is None else {size})


@pytest.mark.parametrize(("etp", "ep", "is_refused"), [(1, 2, False), (2, 4, False), (1, 6, True), (2, 6, True)])
def test_numbers_of_ranks_that_deep_ep_does_not_know_are_refused(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, etp: int, ep: int, is_refused: bool
) -> None:
    monkeypatch.setattr("megarl.preflight.model.model_sizes.deep_ep_fault", lambda: None)
    recipe = _recipe(tiny_model, {"moe_dispatcher": "flex", "ep": ep, "etp": etp})
    models = models_of(recipe, parallel_of(recipe))
    told = [*check_experts(recipe, models.policy.shape)]
    assert len(told) == is_refused
    assert not is_refused or f"trainer.etp {etp} * trainer.ep 6 is {etp * ep}; change these sizes" in told[0]


def _recipe(tiny_model: Callable[..., Path], trainer: dict[str, object]) -> Recipe:
    model = tiny_model(family="qwen3_moe", hidden_size=64, num_layers=2, num_experts=24)
    sections = {"name": "n", "loop": "rl", "model": {"path": str(model)}, "data": {"train": "unused"}}
    return Recipe.model_validate(sections | {"cluster": {"ranks_per_node": 24}, "trainer": trainer})
