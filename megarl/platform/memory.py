"""Peak memory of this rank: its share of the accelerator's, or on a CPU its process's."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

_RESET_PEAK = "5"


def peak_bytes() -> int:
    """The most memory that was in use since `reset_peak`.

    On an accelerator all of its memory in use now, by whichever library or process, and what torch's allocator had
    beyond what it has now; on a CPU the resident set of the process, shared pages included.
    """
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        given_back = torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
        return total - free + given_back
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int((status.get("VmHWM") or status["VmRSS"]).split()[0]) << 10


def reset_peak() -> None:
    """Begin a new peak. Where the system does not let a process reset its own, the peak is that since its start."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
