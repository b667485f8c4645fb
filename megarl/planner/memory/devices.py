"""Memory of GPUs by name, and memory taken by libraries before any tensor is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.planner.memory.memory_table import Phase

GPU_MEMORY_GIB = {"h100": 79.1, "h200": 139.8, "b200": 178.3}
"""GiB of each GPU as reported by torch. Source: NVIDIA's data sheets, minus the driver's share."""

MARGIN_GIB = 8.0
"""GiB of a GPU that the default KV cache leaves free, because the predicted memory has errors. The memory of NCCL was
never measured with megarl.
"""

CONTEXT_BYTES = int(2.7e9)
"""Bytes of GPU memory for CUDA's context, kernels, and workspaces of cuBLAS, cuDNN and vLLM. Fitted to one run on an
H200 (tools/bench/results/h200.jsonl, grpo_gpu.py): all memory in use, minus all other terms.
"""
FRAGMENTATION_SHARE = 0.026
"""Memory held unused by torch's allocator, divided by a phase's temporary memory. Source: `tools/check.py allocator`, a
simulation with expandable segments. Ordinary segments have 0.67.
"""
PINNED_BLOCK_BYTES = 1 << 30
"""Checkpoints are staged in blocks of page-locked host memory with this many bytes. Equal to
`training.host.offload.BLOCK_BYTES`.
"""
LIBRARY_BYTES = 500 << 20
"""Bytes of host memory for a rank's libraries, before any weight is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """Device of a run's ranks: GPUs, or CPUs, where all memory is host memory."""

    is_gpu: bool
    has_transformer_engine: bool

    @property
    def kind(self) -> str:
        return "cuda" if self.is_gpu else "cpu"


GPU = Platform(is_gpu=True, has_transformer_engine=True)
CPU = Platform(is_gpu=False, has_transformer_engine=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """GiB of a trainer's GPU and of an engine's GPU. With shared GPUs they are equal."""

    trainer: float
    engine: float

    def gib_for(self, phase: Phase) -> float:
        return self.engine if phase.part == "engine" else self.trainer
