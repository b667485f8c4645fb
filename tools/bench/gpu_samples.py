"""Samples of a GPU by nvidia-smi while something else runs: how long it is busy, its clock, power and temperature."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import threading
from types import TracebackType
from typing import Self

QUERIES = {
    "gpu_busy": "utilization.gpu",
    "sm_clock_mhz": "clocks.sm",
    "power_watts": "power.draw",
    "temperature_celsius": "temperature.gpu",
}
"""Fields of nvidia-smi by the names of the samples. `gpu_busy` is the percentage of time in which a kernel ran."""
PERIOD_MILLISECONDS = 250


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
