"""Backends of process groups: NCCL for GPU tensors, gloo for host tensors.

gloo copies GPU tensors to the host first. But its coalesced all-gather reads GPU memory on the host and crashes, even
with one rank (pytorch issue 152645). Megatron's distributed optimizer calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.types import MegarlError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

HOST_ONLY = "cpu:gloo"
"""Backend of a group for host tensors. torch then refuses GPU tensors; with plain "gloo" it would accept them."""


class GlooOnlyGroupError(MegarlError):
    """Raised for a process group that would send GPU tensors over gloo."""


def backends_for(device: torch.device) -> str:
    """Return the backends of a group for host tensors and tensors on `device`."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def require_gpu_backend(group: ProcessGroup, name: str, device: torch.device) -> None:
    """Raise GlooOnlyGroupError naming the group if it would send tensors on `device` over gloo."""
    if device.type == "cpu":
        return
    backend = group._get_backend(device).name() if device.type in [d.type for d in group._device_types] else None
    if backend is None or backend.lower() == "gloo":
        fault = "it has gloo for host tensors only" if backend is None else "gloo reads GPU memory on the host"
        raise GlooOnlyGroupError(
            f"process group {name} of ranks on {device.type}: {fault}; create it with {backends_for(device)}"
        )
