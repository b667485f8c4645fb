"""Peak memory of this rank."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

_RESET_PEAK = "5"
"""Written to /proc/self/clear_refs, this text resets the kernel's peak of this process's resident memory (proc(5))."""

_fixed_peak: int | None = None
"""Peak of the current call in bytes, fixed by `fix_peak`; None: it is still measured."""


def restart_peak() -> None:
    """Forget the peak so far. Call it within a phase, after the previous phase's memory was released."""
    _measure_and_reset_peak()


def fix_peak() -> None:
    """Fix the peak of the current call.

    Call it before the last part of a call, if this part prepares the next phase.
    """
    global _fixed_peak
    _fixed_peak = _measure_and_reset_peak()


def take_peak_bytes() -> int | None:
    """Return the peak memory in bytes since the last call, or until `fix_peak`, and start a new peak."""
    global _fixed_peak
    if (peak := _fixed_peak) is not None:
        _fixed_peak = None
        return peak
    return _measure_and_reset_peak()


def _measure_and_reset_peak() -> int | None:
    """Return the peak memory in bytes since the last measurement, and start a new peak.

    On a GPU: all memory in use now, plus memory that torch's allocator has returned since its peak. On a CPU: the
    process's resident set; if the system forbids a reset, its peak since the process started. None in a process without
    a model.
    """
    if "torch" not in sys.modules:
        return None
    import torch

    if not torch.cuda.is_available():
        return _take_resident_peak()
    # A query would initialise CUDA on torch's current device: the first GPU, until a rank sets its own.
    if not torch.cuda.is_initialized():
        return None
    from megarl.platform import device

    rank_device = device.current()
    free_bytes, total_bytes = torch.cuda.mem_get_info(rank_device)
    returned_bytes = torch.cuda.max_memory_reserved(rank_device) - torch.cuda.memory_reserved(rank_device)
    torch.cuda.reset_peak_memory_stats(rank_device)
    return total_bytes - free_bytes + returned_bytes


def _take_resident_peak() -> int:
    # getrusage is one system call, while /proc/self/status must be parsed. ru_maxrss is in KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    return peak
