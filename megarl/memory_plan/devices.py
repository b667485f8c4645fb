"""Memory of GPUs by name, and memory taken by libraries before any tensor is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megarl.memory_plan.memory_table import MemoryTable, Phase

GPU_MEMORY_GIB = {"h100": 79.1, "h200": 139.8, "b200": 178.3}
"""Memory of each GPU as reported by torch, in GiB. Source: NVIDIA's data sheets, minus the driver's share."""

MARGIN_GIB = 8.0
"""GiB of a GPU kept free when the size of the KV cache is computed. NCCL's buffers and the allocator's waste are
guesses."""

CONTEXT_BYTES = int(2.2e9)
"""GPU memory of CUDA's context, kernels, cuBLAS workspaces, and waste in the allocator's blocks, in bytes. (A
guess.)"""
COMMUNICATOR_BYTES = int(0.35e9)
"""GPU memory of the buffers of one NCCL communicator, in bytes. (A rough estimate.)"""
GRAPH_BYTES = int(2.0e9)
"""GPU memory of an engine's CUDA graphs, in bytes. (A rough estimate.)"""
PINNED_BLOCK_BYTES = 1 << 30
"""Bytes of one block of page-locked host memory for staging checkpoints, equal to `training.staging.BLOCK_BYTES`."""
LIBRARY_BYTES = 500 << 20
"""Host memory that a rank's libraries take before any weight is loaded, in bytes."""


@dataclass(frozen=True, slots=True)
class Platform:
    """Device of a run's ranks: GPUs, or a CPU, where all memory is host memory."""

    is_gpu: bool
    has_transformer_engine: bool

    @property
    def kind(self) -> str:
        return "cuda" if self.is_gpu else "cpu"


GPU = Platform(is_gpu=True, has_transformer_engine=True)
CPU = Platform(is_gpu=False, has_transformer_engine=False)


class GpuMemory(NamedTuple):
    """Memory in GiB of one of the trainer's GPUs and of one of the engines' GPUs. With shared GPUs they are equal."""

    trainer: float
    engine: float

    def gib_for(self, phase: Phase) -> float:
        """Return the memory in GiB of the GPU running a phase."""
        return self.engine if phase.part == "engine" else self.trainer

    def exceeded(self, table: MemoryTable) -> list[Phase]:
        """Return the phases that need more memory than their GPU has."""
        return [phase for phase in table.phases if phase.device_bytes > self.gib_for(phase) * 2**30]
