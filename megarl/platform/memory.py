"""Peak memory of this rank: its share of the accelerator's, or on a CPU its process's."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

_RESET_PEAK = "5"


def take_peak_bytes() -> int | None:
    """The most memory that was in use since the call before; then a new peak begins.

    On an accelerator all of its memory in use now, by whichever library or process, and what torch's allocator had
    beyond what it has now; on a CPU the resident set of the process, shared pages included, and where the system does
    not let a process reset its own peak, the most since its start. None in a process that has no model: it never
    imported torch, or uses no accelerator where there are some.
    """
    if "torch" not in sys.modules:
        return None
    import torch

    if not torch.cuda.is_available():
        return _take_resident_peak()
    # To ask is to begin using the device that is torch's current one: before a rank has set its own, the first.
    if not torch.cuda.is_initialized():
        return None
    from megarl.platform import device

    own = device.current()
    free, total = torch.cuda.mem_get_info(own)
    given_back = torch.cuda.max_memory_reserved(own) - torch.cuda.memory_reserved(own)
    torch.cuda.reset_peak_memory_stats(own)
    return total - free + given_back


def _take_resident_peak() -> int:
    # The kernel tells a process its own peak in a call, where /proc/self/status is a page to be read.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    return peak
