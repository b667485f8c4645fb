"""Ceilings of a device, measured in the same run as what is compared with them: products, copies, page-locking.

Each function returns one number a round, after a round that warms up.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megarl.platform.gpu_needs import Need
from megarl.platform.visible_gpus import Capability

PRODUCTS = 10
"""Matrix products in a round: enough to hide the time of a launch."""


def device() -> torch.device:
    """Return the GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait_for_device() -> None:
    """Wait until the GPU has done all its work. Does nothing on a CPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds until the device has done the work."""
    wait_for_device()
    started = time.perf_counter()
    work()
    wait_for_device()
    return time.perf_counter() - started


def round_seconds(work: Callable[[], object], rounds: int) -> list[float]:
    """Return the seconds of each round after one that warms up."""
    return [seconds_of(work) for _ in range(rounds + 1)][1:]


class Gemm:
    """Square bfloat16 products of `width`: their TFLOP/s are the ceiling of what computes in bfloat16.

    `flops` is the number of operations of `multiply`.
    """

    def __init__(self, width: int) -> None:
        self.flops = 2 * width**3 * PRODUCTS
        self._factors = [torch.randn(width, width, device=device(), dtype=torch.bfloat16) for _ in range(2)]

    def multiply(self) -> None:
        """Make the products of a round."""
        left, right = self._factors
        for _ in range(PRODUCTS):
            torch.matmul(left, right)

    def tflops(self, rounds: int) -> list[float]:
        """Return the TFLOP/s of each round."""
        return [self.flops / seconds / 1e12 for seconds in round_seconds(self.multiply, rounds)]


def fp8_gemm_tflops(width: int, rounds: int) -> list[float]:
    """Return the TFLOP/s of products of FP8 matrices with one scale each. Needs compute capability 8.9 or newer."""
    left, right = (torch.randn(width, width, device=device()).to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.ones((), device=device())

    # torch 2.11 has no public product of FP8 matrices.
    product: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]

    def multiply() -> list[Tensor]:
        # The right factor must be stored by columns.
        return [
            product(left, right.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16) for _ in range(PRODUCTS)
        ]

    return [2 * width**3 * PRODUCTS / seconds / 1e12 for seconds in round_seconds(multiply, rounds)]


def explain_missing_fp8(capability: Capability) -> str | None:
    """Return why a GPU with this compute capability multiplies no FP8 matrices; None if it does."""
    # torch's _scaled_mm refuses older GPUs.
    if (missed := Need((8, 9)).range_missed_by(capability)) is None:
        return None
    return f"products of FP8 need compute capability {missed}; this GPU has {'.'.join(map(str, capability))}"


def copy_rates(num_bytes: int, rounds: int) -> list[float]:
    """Return GB/s of copies within the device's memory; bytes read and written both count."""
    source, target = (torch.ones(num_bytes, dtype=torch.uint8, device=device()) for _ in range(2))
    return [2 * num_bytes / seconds / 1e9 for seconds in round_seconds(lambda: target.copy_(source), rounds)]


def host_copy_rates(num_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Return GB/s of copies from page-locked memory to the GPU, and of copies back."""
    on_host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=True)
    on_gpu = torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
    copies = {
        "host_to_device": lambda: on_gpu.copy_(on_host, non_blocking=True),
        "device_to_host": lambda: on_host.copy_(on_gpu, non_blocking=True),
    }
    return {
        name: [num_bytes / seconds / 1e9 for seconds in round_seconds(copy, rounds)] for name, copy in copies.items()
    }


def page_locking_seconds(num_bytes: int, rounds: int) -> list[float]:
    """Return the seconds per GB of page-locking memory that was never used, in one piece of exactly `num_bytes`."""
    runtime: Any = torch.cuda.cudart()
    seconds: list[float] = []
    for _ in range(rounds):
        # A new piece in each round: pages that are in use already take less time.
        piece = torch.empty(num_bytes, dtype=torch.uint8)
        started = time.perf_counter()
        code = int(runtime.cudaHostRegister(piece.data_ptr(), num_bytes, 0))
        seconds.append((time.perf_counter() - started) / (num_bytes / 1e9))
        if code:
            raise RuntimeError(f"cudaHostRegister of {num_bytes} bytes failed with code {code}")
        runtime.cudaHostUnregister(piece.data_ptr())
    return seconds
