"""The device of this rank, and the process groups over it."""

from __future__ import annotations

import os
from datetime import timedelta

import torch


def current() -> torch.device:
    """The accelerator of this rank, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def rank_environment(ranks_per_node: int) -> dict[str, str]:
    """Environment of each rank, to be set before it starts: its share of the cores, Megatron's one queue.

    On CPU the C library shall copy blocks of more than half a MiB past the caches, which doubles their speed: in a
    virtual machine it takes the whole host's last cache for this one's, and so never would.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // ranks_per_node)
    environment = {"OMP_NUM_THREADS": str(threads), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if current().type == "cpu":
        environment["GLIBC_TUNABLES"] = os.environ.get(
            "GLIBC_TUNABLES", f"glibc.cpu.x86_non_temporal_threshold={1 << 19}"
        )
    return environment


def init_world(timeout_seconds: float) -> None:
    """Join the world that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe, unless this process is in one."""
    if torch.distributed.is_initialized():
        return
    device = current()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=timeout_seconds)
    )
