"""The device of this rank, and the world of `torch.distributed`."""

from __future__ import annotations

import os
from datetime import timedelta

import torch

from megarl.platform import rendezvous


def current() -> torch.device:
    """The accelerator of this rank, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def rank_environment(ranks_per_node: int) -> dict[str, str]:
    """Environment variables to be set before a rank starts: cores, CUDA connections, cache folders.

    Compiled kernels are cached in the user's folder, for a rank's temporary folder ends with it. On a CPU the C library
    shall copy blocks of more than half a MiB past the caches, which doubles their speed: in a virtual machine it takes
    the host's last-level cache for its own, and so never would.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // ranks_per_node)
    environment = {"OMP_NUM_THREADS": str(threads), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if current().type == "cuda":
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        environment["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get(
            "TORCHINDUCTOR_CACHE_DIR", os.path.join(caches, "megarl", "torchinductor")
        )
    else:
        environment["GLIBC_TUNABLES"] = os.environ.get(
            "GLIBC_TUNABLES", f"glibc.cpu.x86_non_temporal_threshold={1 << 19}"
        )
    return environment


def forkable_imports(*modules: str) -> tuple[str, ...]:
    """Those of the modules that may be imported before ranks are forked: all on a CPU, none where there is a GPU.

    What an import may initialise there, CUDA above all, does not survive a fork.
    """
    return modules if current().type == "cpu" else ()


def init_world(timeout_seconds: float) -> None:
    """Initialise `torch.distributed` from RANK and WORLD_SIZE at the run's rendezvous, unless that is done already."""
    if torch.distributed.is_initialized():
        return
    device = current()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world_size = int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=rendezvous.store(world_size, timeout_seconds),
        rank=int(os.environ["RANK"]),
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds),
    )
