"""Memory of GPUs by name, and what libraries take of it before any tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megarl.memory.table import MemoryTable, Phase

GPU_MEMORY_GIB = {"h100": 79.1, "h200": 139.8, "b200": 178.3}
"""Memory of a GPU as torch finds it, in GiB. Source: NVIDIA's data sheets, less what the driver keeps."""

MARGIN_GIB = 8.0
"""GiB of a GPU that a derived KV cache leaves free: NCCL's buffers and the allocator's blocks are only guessed here."""

CONTEXT_BYTES = int(2.2e9)
"""CUDA's context, kernels, workspaces of cuBLAS, and what the allocator's blocks waste. (A guess.)"""
COMMUNICATOR_BYTES = int(0.35e9)
"""NCCL's buffers of one communicator. (A guess.)"""
GRAPH_BYTES = int(2.0e9)
"""The engine's CUDA graphs. (A guess.)"""
PINNED_BLOCK_BYTES = 1 << 30
"""Blocks of page-locked host memory that a checkpoint is staged in; as `training.staging.BLOCK_BYTES`."""
LIBRARY_BYTES = 500 << 20
"""Host memory of a rank's libraries, before any weight is loaded."""


@dataclass(frozen=True, slots=True)
class Platform:
    """Where a run's ranks are: on GPUs, or on a CPU, whose memory has all."""

    is_gpu: bool
    has_transformer_engine: bool

    @property
    def kind(self) -> str:
        return "cuda" if self.is_gpu else "cpu"


GPU = Platform(is_gpu=True, has_transformer_engine=True)
CPU = Platform(is_gpu=False, has_transformer_engine=False)


class GpuMemory(NamedTuple):
    """Memory in GiB of a GPU on which the trainer is, and of one on which engines are: the same, or another kind."""

    trainer: float
    engine: float

    def of(self, phase: Phase) -> float:
        """That of the GPU that a phase's memory is on."""
        return self.engine if phase.part == "engine" else self.trainer

    def exceeded(self, table: MemoryTable) -> list[Phase]:
        """The phases that take more than their GPU has."""
        return [phase for phase in table.phases if phase.device_bytes > self.of(phase) * 2**30]
