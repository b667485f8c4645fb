"""File with the place of every rank at the moment when one of them fell silent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Protocol

from megarl.cluster.rank_handle import RankHandle
from megarl.cluster.stacks import ranks_named
from megarl.files.atomic import append_whole

_NATIVE_SECONDS = 10.0
"""Seconds for the native stacks of all ranks. A run must end within 30 s of a missed deadline."""
_MOST_NATIVE = 8
"""Maximum number of ranks whose native stacks are read, silent ranks first. A debugger takes seconds for each."""


class Ranks(Protocol):
    """A group of ranks; `WorkerGroup` implements it."""

    @property
    def handles(self) -> Sequence[RankHandle]: ...

    async def current_stacks(self) -> dict[int, str]: ...


class HangReport:
    """Writes `hang_1.txt`, `hang_2.txt` and so on into an attempt's log folder.

    Such a file has, for each rank of the run, its Python stacks. Ranks on the driver's machine have the state of each
    thread in the kernel too, and native stacks if py-spy or gdb is installed. `groups` returns the run's groups.
    """

    def __init__(self, folder: Path, groups: Callable[[], Sequence[Ranks]]) -> None:
        self._folder, self._groups = folder, groups

    async def write(
        self, group: Ranks, what: str, silent: Sequence[RankHandle], stacks: Mapping[int, str]
    ) -> Path | None:
        """Write a report about the silent ranks of a group, and return its path; None if it cannot be written.

        `what` says what they missed. `stacks` are the Python stacks of the group's ranks, by rank.
        """
        others = [other for other in self._groups() if other is not group]
        found = await asyncio.gather(*(other.current_stacks() for other in others), return_exceptions=True)
        every = dict(stacks)
        for answer in found:
            every |= answer if isinstance(answer, dict) else {}
        handles = sorted((handle for one in [group, *others] for handle in one.handles), key=lambda one: one.rank)
        first = next((handle for handle in handles if handle in silent), None)
        lines = [
            f"{datetime.now().astimezone().isoformat(timespec='seconds')}: "
            f"{ranks_named(sorted(handle.rank for handle in silent))} {what}",
            f"first silent rank: {first.rank if first else 'unknown'}",
        ]
        for handle in handles:
            lines += [f"\n== rank {handle.rank}: threads in the kernel ==", handle.thread_states() or "unknown"]
            lines += [f"\n== rank {handle.rank}: Python ==", every.get(handle.rank, "").strip() or "wrote no stack"]
        path = self._unused_path()
        # The machine may have lost its disk; the error must name the silent rank all the same.
        with suppress(OSError):
            append_whole(path, ("\n".join(lines) + "\n").encode(errors="replace"))
            chosen = sorted(handles, key=lambda handle: handle not in silent)[:_MOST_NATIVE]
            native = await asyncio.gather(*(asyncio.to_thread(one.native_stacks, _NATIVE_SECONDS) for one in chosen))
            for handle, text in zip(chosen, native, strict=True):
                append_whole(path, f"\n== rank {handle.rank}: native ==\n{text}\n".encode(errors="replace"))
            return path
        return None

    def _unused_path(self) -> Path:
        number = 1
        while (path := self._folder / f"hang_{number}.txt").exists():
            number += 1
        return path
