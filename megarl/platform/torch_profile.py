"""torch's profile of one step."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megarl.platform import device, spans
from megarl.types import ConfigError

if TYPE_CHECKING:
    import torch

Kind = Literal["torch", "memory"]

_MOST_ALLOCATIONS = 200_000
"""Maximum newest allocations and frees in a snapshot. Each takes about 1 KB with its Python stack."""


class TorchProfile:
    """torch's profile of one step in this process.

    Kind `torch`: torch.profiler's trace of operators, and on CUDA of kernels. Kind `memory`: a snapshot of CUDA's
    allocator with all allocations since `start`. Spans (`spans.span`) become named ranges in the trace, and NVTX ranges
    on CUDA. Profiling operators slows the step down.
    """

    def __init__(self, kinds: Collection[Kind]) -> None:
        """Prepare the profile. Raises ConfigError for `memory` without CUDA, because torch records no CPU memory."""
        self._kinds = frozenset(kinds)
        self._is_cuda = device.current().type == "cuda"
        if "memory" in self._kinds and not self._is_cuda:
            raise ConfigError(
                "train.profile_with = memory: this rank runs on a CPU, and torch takes snapshots of CUDA's allocator "
                "only; leave out memory"
            )
        self._profile: torch.profiler.profile | None = None

    def start(self) -> None:
        """Start the kinds of profile that the recipe requests."""
        import torch

        if "torch" in self._kinds:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._is_cuda:
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            # No shapes or stacks: files would be several times larger, and steps several times slower.
            self._profile = torch.profiler.profile(activities=activities)
            self._profile.start()
            spans.annotate_with(self._name_operations)
        if "memory" in self._kinds:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS, stacks="python")

    def stop(self, folder: Path, rank: int) -> list[str]:
        """Stop recording, and write `rank_N.json.gz` and `memory_rank_N.pickle` to a folder. Returns the file names.

        Raises OSError.
        """
        import torch

        spans.annotate_with(None)
        folder.mkdir(parents=True, exist_ok=True)
        names = []
        if self._profile is not None:
            profile, self._profile = self._profile, None
            profile.stop()
            names.append(f"rank_{rank}.json.gz")
            # torch compresses files named .gz. Perfetto and chrome://tracing read them.
            profile.export_chrome_trace(str(folder / names[-1]))
        if "memory" in self._kinds:
            names.append(f"memory_rank_{rank}.pickle")
            torch.cuda.memory._dump_snapshot(str(folder / names[-1]))
            torch.cuda.memory._record_memory_history(enabled=None)
        return names

    @contextmanager
    def _name_operations(self, name: str) -> Iterator[None]:
        """Context that names its operations in torch's profile and, on a GPU, in Nsight's."""
        import torch

        with torch.profiler.record_function(name):
            if not self._is_cuda:
                yield
                return
            with torch.cuda.nvtx.range(name):
                yield
