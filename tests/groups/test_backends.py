"""Backends of groups: those that GPU tensors enter are never left to gloo."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megarl.config.parallel import ParallelConfig
from megarl.groups import backends, megatron_ranks, world
from megarl.groups.backends import HOST_ONLY, GlooOnlyGroupError
from megarl.platform import device
from tests.rank_pool import RankPool
from tests.shapes import small_shape

GPU = torch.device("cuda", 0)


def refusals() -> dict[str, str]:
    """Return the messages for groups that tensors on a GPU would enter, by the kind of group."""
    from megatron.core import parallel_state

    found: dict[str, str] = {}

    def record(kind: str, check: object, *arguments: object) -> None:
        assert callable(check)
        try:
            check(*arguments)
        except GlooOnlyGroupError as error:
            found[kind] = str(error)

    for backend in ("gloo", "cpu:gloo,cuda:gloo", HOST_ONLY):
        group = dist.new_group(backend=backend)
        record(backend, backends.require_gpu_backend, group, "copies", GPU)
        record(f"{backend} on the CPU", backends.require_gpu_backend, group, "copies", torch.device("cpu"))
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    record("Megatron", megatron_ranks.require_gpu_backends, GPU)
    # A world that is initialised already: this test's is gloo only, as that of a program may be.
    with patch.object(device, "current", lambda: GPU):
        record("world", world.initialize, 60)
    return found


def test_gloo_is_refused_where_gpu_tensors_enter(ranks: RankPool) -> None:
    [found] = ranks.run(refusals, world_size=1)
    assert set(found) == {"gloo", "cpu:gloo,cuda:gloo", HOST_ONLY, "Megatron", "world"}
    assert all("process group copies " in found[kind] for kind in ("gloo", "cpu:gloo,cuda:gloo", HOST_ONLY))
    assert "process group the torch world " in found["world"]
    assert "_PARALLEL_GROUP" in found["Megatron"]


def gloo_groups_of_a_trainer() -> list[str]:
    from megatron.core import parallel_state

    from megarl.training.model import _create_process_groups

    _create_process_groups(1, ParallelConfig(1, 1, 1, 1), small_shape())
    return [name for name, group in vars(parallel_state).items() if "GLOO" in name and group is not None]


def test_a_trainer_has_no_further_groups_over_gloo(ranks: RankPool) -> None:
    """Megatron would add one to each group of data-parallel ranks; with a GPU they are refused."""
    assert ranks.run(gloo_groups_of_a_trainer, world_size=1) == [[]]


def host_messages() -> tuple[int, str]:
    group = dist.new_group(backend=HOST_ONLY, group_desc="rows")
    assert isinstance(group, dist.ProcessGroup)
    total = torch.ones(2, dtype=torch.int64)
    dist.all_reduce(total, group=group)
    dist.barrier(group)
    # torch refuses other devices by itself.
    with pytest.raises(RuntimeError, match="No backend type associated with device type"):
        group._get_backend(torch.device("cuda"))
    return int(total[0]), str(dist.get_backend_config(group))


def test_host_tensors_enter_a_host_group(ranks: RankPool) -> None:
    assert ranks.run(host_messages, world_size=1) == [(1, HOST_ONLY)]
