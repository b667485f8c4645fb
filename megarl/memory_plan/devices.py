"""Memory of GPUs by name, and of libraries before any tensor is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megarl.memory_plan.memory_table import MemoryTable, Phase

GPU_MEMORY_GIB = {"h100": 79.1, "h200": 139.8, "b200": 178.3}
"""Memory of a GPU as reported by torch, in GiB. Source: NVIDIA's data sheets, minus the driver's share."""

MARGIN_GIB = 8.0
"""GiB of a GPU left free by a derived KV cache. NCCL's buffers and the allocator's blocks are only guessed here."""

CONTEXT_BYTES = int(2.2e9)
"""CUDA's context, kernels, workspaces of cuBLAS, and waste in the allocator's blocks. (A guess.)"""
COMMUNICATOR_BYTES = int(0.35e9)
"""GPU memory of the buffers of one NCCL communicator, in bytes. (A rough estimate.)"""
GRAPH_BYTES = int(2.0e9)
"""GPU memory of an engine's CUDA graphs, in bytes. (A rough estimate.)"""
PINNED_BLOCK_BYTES = 1 << 30
"""Bytes of one block of page-locked host memory for staging checkpoints, equal to `training.staging.BLOCK_BYTES`."""
LIBRARY_BYTES = 500 << 20
"""Host memory used by a rank's libraries before any weight is loaded, in bytes."""


@dataclass(frozen=True, slots=True)
class Platform:
    """Device of a run's ranks: GPUs, or a CPU with all memory in the host."""

    is_gpu: bool
    has_transformer_engine: bool

    @property
    def kind(self) -> str:
        return "cuda" if self.is_gpu else "cpu"


GPU = Platform(is_gpu=True, has_transformer_engine=True)
CPU = Platform(is_gpu=False, has_transformer_engine=False)


class GpuMemory(NamedTuple):
    """Memory in GiB of a trainer's GPU and of an engine's GPU. Both may be the same GPU, or GPUs of different
    models."""

    trainer: float
    engine: float

    def of(self, phase: Phase) -> float:
        """Return the memory of a phase's GPU in GiB."""
        return self.engine if phase.part == "engine" else self.trainer

    def exceeded(self, table: MemoryTable) -> list[Phase]:
        """Return the phases that exceed their GPU's memory."""
        return [phase for phase in table.phases if phase.device_bytes > self.of(phase) * 2**30]
