"""The `torch.distributed` world of a rank: all ranks of a group of processes started together."""

from __future__ import annotations

import os
from datetime import timedelta

import torch

from megarl.groups import backends, rendezvous
from megarl.platform import device, numa


def leave() -> None:
    """Destroy this rank's torch world and all its groups. Ranks waiting for this rank in a collective then fail."""
    torch.distributed.destroy_process_group()


def initialize(timeout_seconds: float) -> None:
    """Initialise `torch.distributed` from RANK and WORLD_SIZE at the run's rendezvous. Later calls do nothing.

    `timeout_seconds` limits each collective. Raises ConfigError if this machine lacks the chosen device, and
    GlooOnlyGroupError if an earlier initialisation would send GPU tensors over gloo.
    """
    if torch.distributed.is_initialized():
        backends.require_gpu_backend(_world(), "the torch world", device.current())
        return
    device.require()
    rank_device = device.current()
    if rank_device.type == "cuda":
        # Set before the groups exist, because NCCL uses the current device of each rank.
        torch.cuda.set_device(rank_device)
        numa.bind_rank()
        # More threads than cores would wait for each other. Until here the number fits the driver's cores.
        torch.set_num_threads(min(torch.get_num_threads(), len(os.sched_getaffinity(0))))
    world_size = int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group(
        backends.backends_for(rank_device),
        store=rendezvous.store(world_size, timeout_seconds),
        rank=int(os.environ["RANK"]),
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )
    backends.require_gpu_backend(_world(), "the torch world", rank_device)


def _world() -> torch.distributed.ProcessGroup:
    group = torch.distributed.group.WORLD
    assert group is not None
    return group
