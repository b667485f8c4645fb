"""A model's save on a full disk: it fails on all ranks alike, and the next one succeeds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from tests.rank_pool import RankPool
from tests.service.test_rank_adapters import ADAM, run_call
from tests.training.parts.test_lora import DENSE, SETTINGS, build, lora_recipe


def save_twice(recipe: Recipe, parallel: ParallelConfig, full: Path, roomy: Path) -> tuple[list[str | None], bool]:
    """Return this rank's faults of both saves, and whether the second one loads with the same bits."""
    import torch

    from megarl.service.ranks.rank_adapters import Adapters

    engine, *_ = build(recipe, parallel)
    adapters = Adapters(engine, parallel)
    adapters.create("0", 100)
    for call in range(2):
        run_call(adapters, 0, call, parallel)
    adapters.step("0", ADAM)
    faults = [adapters.save("0", folder)[1] for folder in (full, roomy)]
    assert adapters.load("loaded", roomy, True) is None
    adapters.show(None)
    saved, loaded = (adapters._states_in_memory[name].tensors for name in ("0", "loaded"))
    return faults, all(torch.equal(one, other) for one, other in zip(saved, loaded, strict=True))


def load_damaged(recipe: Recipe, parallel: ParallelConfig, folder: Path) -> tuple[list[str | None], bool]:
    """Return this rank's faults of loads from a cut file, and whether another model has the same bits afterwards."""
    import torch

    from megarl.service.ranks.rank_adapters import Adapters

    engine, *_ = build(recipe, parallel)
    adapters = Adapters(engine, parallel)
    adapters.create("0", 100)
    for call in range(3):
        run_call(adapters, 0, call, parallel)
    assert adapters.save("0", folder)[1] is None
    adapters.show(None)
    before = [tensor.clone() for tensor in adapters._states_in_memory["0"].tensors]
    if torch.distributed.get_rank() == 0:
        file = folder / "__1_0.distcp"
        os.truncate(file, file.stat().st_size // 2)
    torch.distributed.barrier()
    faults = [adapters.load("loaded", folder, True), adapters.publish_folder(folder, "version")]
    assert not adapters._weights_by_version and "loaded" not in adapters._states_in_memory
    adapters.clear("0")
    adapters.show(None)
    after = adapters._states_in_memory["0"].tensors
    return faults, all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_file_that_is_cut_after_its_check_fails_the_load_on_all_ranks(
    ranks: RankPool, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    recipe: Any = lora_recipe(tiny_model(**(SETTINGS | DENSE)), overlap_grad_reduce=False)
    parallel = ParallelConfig(tp=1, pp=1, dp=2, rollout_tp=1)
    for faults, is_equal in ranks.run(load_damaged, recipe, parallel, tmp_path, world_size=2):
        assert is_equal and all(fault is not None and str(tmp_path) in fault for fault in faults), faults


@pytest.mark.parametrize("size", ["size=64k", "size=512k", "size=64m,nr_inodes=3"])
def test_a_full_disk_fails_one_save_on_all_ranks(
    ranks: RankPool,
    tiny_model: Callable[..., Path],
    small_disk: Callable[[str], Path],
    tmp_path: Path,
    size: str,
) -> None:
    """The first disk has no room for the records, the second none for the tensors, the third none for a second file."""
    recipe: Any = lora_recipe(tiny_model(**(SETTINGS | DENSE)), overlap_grad_reduce=False)
    parallel = ParallelConfig(tp=1, pp=1, dp=2, rollout_tp=1)
    full, roomy = small_disk(size) / "partial", tmp_path / "roomy"
    full.mkdir()
    roomy.mkdir()
    results = ranks.run(save_twice, recipe, parallel, full, roomy, world_size=2)
    assert any(first for (first, _), _ in results), "one rank names the fault"
    assert all(second is None and is_equal for (_, second), is_equal in results)
    assert not {"metadata.json", ".metadata"} & set(os.listdir(full)), "the folder is not taken for a checkpoint"
