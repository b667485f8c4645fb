"""Parts that benchmarks of a device share: time of its work, ceilings, and samples by nvidia-smi.

Ceilings are measured in the same run as what is compared with them: products, copies, page-locking. Each such function
returns one number a round, after a round that warms up. The lines that benchmarks print, and the description of the
machine, are in `report.py`.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from megarl.platform.gpu_needs import Need
from megarl.platform.visible_gpus import Capability
from tools.bench.parts import report
from tools.bench.parts.budget import Budget

PRODUCTS = 10
"""Matrix products in a round: enough to hide the time of a launch."""
QUERIES = {
    "gpu_busy": "utilization.gpu",
    "sm_clock_mhz": "clocks.sm",
    "power_watts": "power.draw",
    "temperature_celsius": "temperature.gpu",
}
"""Fields of nvidia-smi by the names of the samples. `gpu_busy` is the percentage of time in which a kernel ran."""
PERIOD_MILLISECONDS = 250


def device() -> torch.device:
    """Return the GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def refuse_missing_cuda(kind: str, trial: str) -> None:
    """End with status 2 if a benchmark shall run on `cuda`, and there is none. `trial` are options that need no GPU."""
    if kind == "cuda" and not torch.cuda.is_available():
        name = Path(sys.argv[0]).name
        print(f"{name} needs CUDA, and torch finds none; {trial} only tries it out", file=sys.stderr)
        raise SystemExit(2)


def release() -> None:
    """Free what nothing refers to any more."""
    gc.collect()
    torch.cuda.empty_cache()


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


class Timed(NamedTuple):
    """Seconds of each round after a first one that warms up; of that one alone where the budget allowed no other."""

    seconds: list[float]
    is_warm_up: bool


def time_rounds(work: Callable[[], object], budget: Budget, rounds: int = 5, name: str | None = None) -> Timed:
    """Time the rounds that the budget allows. With a name, a line is printed after each."""
    seconds: list[float] = []
    for index in budget.rounds(rounds + 1):
        seconds.append(seconds_of(work))
        if name is not None:
            report.print_line({"round": index, "warms_up": index == 0, f"{name}_seconds": round(seconds[-1], 4)})
    return Timed(seconds[1:], False) if len(seconds) > 1 else Timed(seconds, True)


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


class GpuSamples:
    """Samples of the first visible GPU, as a context. Without nvidia-smi, or without its answers, there are none."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._samples: list[list[float]] = []

    def __enter__(self) -> Self:
        if shutil.which("nvidia-smi") is not None and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
            command = ["nvidia-smi", f"--query-gpu={','.join(QUERIES.values())}", "--format=csv,noheader,nounits"]
            command += [f"--id={os.environ.get('CUDA_VISIBLE_DEVICES', '0').split(',')[0]}"]
            command += [f"--loop-ms={PERIOD_MILLISECONDS}"]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            try:
                values = [float(text) for text in line.split(",")]
            # A GPU that does not know one of the values answers [N/A].
            except ValueError:
                continue
            with self._lock:
                self._samples.append(values)

    def take(self) -> dict[str, list[float]]:
        """Return the samples since the last call, by name; empty lists where there are none."""
        with self._lock:
            samples, self._samples = self._samples, []
        columns = zip(*samples, strict=True) if samples else [()] * len(QUERIES)
        return {name: list(column) for name, column in zip(QUERIES, columns, strict=True)}


def means_of(samples: dict[str, list[float]]) -> dict[str, float]:
    """Return the mean of each name that has samples, `gpu_busy` as a share of time, and the lowest clock."""
    means = {name: statistics.fmean(values) for name, values in samples.items() if values}
    if "gpu_busy" in means:
        means["gpu_busy"] /= 100
        means["lowest_sm_clock_mhz"] = min(samples["sm_clock_mhz"])
    return means
