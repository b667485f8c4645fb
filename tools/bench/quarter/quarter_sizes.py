"""Sizes of what `tools/gpu_quarter.py` measures: of an H200, and tiny ones that a CPU computes in minutes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of all items of the list. Shapes are names of `shapes.SHAPES`."""

    rounds: int
    """Rounds of a number, after one that warms up."""

    gemm_width: int
    copy_bytes: int
    host_bytes: int

    update_shape: str
    update_tokens: int
    update_rows: tuple[int, int]
    """Tokens of a packed row: of the first update, and of all others."""

    run_shape: str
    prompts: int
    samples: int
    new_tokens: int
    mean_tokens: int
    run_row: int
    slots: int
    kv_cache_gib: float

    profile_requests: tuple[int, int]
    profile_tokens: int
    """Tokens of each request of a profiled rollout: a trace has hundreds of kernels for each."""

    driver_requests: int
    driver_new_tokens: int
    vllm_limits: Mapping[str, int]
    """Arguments of `vllm.LLM` that bound its batches. Empty: its own defaults, as for each number that is quoted."""

    start_shape: str
    """Shape of the model whose start is timed."""


SIZES = {
    "h200": Size(
        rounds=5,
        gemm_width=8192,
        copy_bytes=8 << 30,
        host_bytes=2 << 30,
        update_shape="qwen3-4b",
        update_tokens=32768,
        update_rows=(8192, 16384),
        run_shape="qwen3-1.7b",
        prompts=32,
        samples=8,
        new_tokens=2048,
        mean_tokens=512,
        run_row=16384,
        slots=256,
        kv_cache_gib=24.0,
        profile_requests=(256, 32),
        profile_tokens=64,
        driver_requests=256,
        driver_new_tokens=384,
        vllm_limits={},
        start_shape="qwen3-0.6b",
    ),
    "tiny": Size(
        rounds=2,
        gemm_width=256,
        copy_bytes=1 << 20,
        host_bytes=1 << 20,
        update_shape="small",
        update_tokens=256,
        update_rows=(64, 128),
        run_shape="small",
        prompts=2,
        samples=2,
        new_tokens=8,
        mean_tokens=6,
        run_row=512,
        slots=4,
        kv_cache_gib=0.25,
        profile_requests=(4, 2),
        profile_tokens=4,
        driver_requests=4,
        driver_new_tokens=8,
        # An imitated H200 has vLLM's defaults of an H200: it warms up with 16,384 tokens and 1,024 requests, which
        # its interpreted kernels do not compute within twenty minutes.
        vllm_limits={"max_num_seqs": 4, "max_num_batched_tokens": 256},
        start_shape="small",
    ),
}
