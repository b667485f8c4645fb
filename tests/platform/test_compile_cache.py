"""Each device has a folder of its own for vLLM's compiled code."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarl.config.parallel import ParallelConfig
from megarl.config.recipe import load
from megarl.planner.sizes import parallel_of
from megarl.platform import compile_cache, device
from megarl.types import ConfigError

RECIPES = sorted((Path(__file__).resolve().parents[2] / "launch/recipes").glob("*.yaml"))


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A rank's device is the GPU of its LOCAL_RANK; the node's disk is the test's folder."""
    monkeypatch.setattr(device, "current", lambda: torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    monkeypatch.setattr(compile_cache, "_NODE_LOCAL", tmp_path / "disk")
    (tmp_path / "disk").mkdir()
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)


def folder_of_rank(monkeypatch: pytest.MonkeyPatch, node: int, local_rank: int, given: str | None) -> str:
    """The folder that vLLM reads in a new process of a rank."""
    monkeypatch.setattr(compile_cache.socket, "gethostname", lambda: f"n{node}")
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    if given is not None:
        monkeypatch.setenv("VLLM_CACHE_ROOT", given)
    compile_cache.use_folder_of_device()
    return os.environ["VLLM_CACHE_ROOT"]


def places(parallel: ParallelConfig, ranks_per_node: int) -> dict[tuple[int, int], int]:
    """The rank in its engine's world by (node, device), as `vllm.config.parallel_config.rank` is."""
    first = parallel.world_size if parallel.is_separate else 0
    size = parallel.rollout_tp if parallel.is_separate else parallel.world_size
    ranks = range(first, parallel.num_ranks)
    return {divmod(rank, ranks_per_node): (rank - first) % size for rank in ranks}


@pytest.mark.parametrize("given", [None, "shared"])
def test_no_two_devices_have_the_same_folder_and_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str | None
) -> None:
    root = str(tmp_path / given) if given else None
    num_collisions = 0
    for recipe in map(load, RECIPES):
        if not recipe.has_engine:
            continue
        own = parallel_of(recipe)
        replicas = replace(own, rollout_ranks=4 * own.rollout_tp)
        for parallel in (own, replicas):
            devices = places(parallel, recipe.cluster.ranks_per_node)
            found = defaultdict(set)
            for (node, index), rank in devices.items():
                # A disk of a node is not that of another.
                disk = None if given else node
                found[disk, folder_of_rank(monkeypatch, node, index, root), rank].add((node, index))
            assert all(len(same) == 1 for same in found.values()), recipe.name
            num_collisions += len(devices) - len({(node, rank) for (node, _), rank in devices.items()})
    assert num_collisions > 0, "without folders of their own, replicas of a node would share one"


def test_engines_of_a_node_have_folders_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders = [folder_of_rank(monkeypatch, 0, local_rank, None) for local_rank in (4, 6, 4)]
    assert folders[0] == folders[2] != folders[1]
    private = tmp_path / f"disk/megarl-{os.getuid()}"
    assert Path(folders[0]).is_relative_to(private) and private.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_write_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    private = tmp_path / f"disk/megarl-{os.getuid()}"
    private.mkdir()
    private.chmod(0o777)
    with pytest.raises(ConfigError, match=r"other users can write it; .*VLLM_CACHE_ROOT"):
        folder_of_rank(monkeypatch, 0, 0, None)
    private.rmdir()
    private.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="VLLM_CACHE_ROOT"):
        folder_of_rank(monkeypatch, 0, 0, None)
