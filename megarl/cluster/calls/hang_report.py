"""File with the place of every rank at the moment when one of them fell silent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from megarl.cluster.calls.group_ranks import GroupRanks
from megarl.cluster.ranks.rank_handle import RankHandle
from megarl.cluster.ranks.stacks import ranks_named
from megarl.files.atomic import append_whole

_NATIVE_SECONDS = 10.0
"""Seconds for the native stacks of all ranks. A run must end within 30 s of a missed deadline."""
_MOST_NATIVE = 8
"""Maximum number of ranks with native stacks in a report, silent ranks first. A debugger takes seconds for each."""


class HangReport:
    """Writes `hang_1.txt`, `hang_2.txt` and so on into an attempt's log folder.

    Each file has the Python stacks and the threads' kernel states of every rank of the run. It also has native stacks
    of up to 8 ranks of the group that the hang ends, silent ranks first. The agents of their nodes read them, with
    py-spy or gdb. `groups()` returns the run's groups of ranks.
    """

    def __init__(
        self, folder: Path, groups: Callable[[], Sequence[GroupRanks]], *, most_native: int = _MOST_NATIVE
    ) -> None:
        """Create a writer into `folder`. It reads native stacks of `most_native` ranks."""
        self._folder, self._groups, self._most_native = folder, groups, most_native

    async def write(
        self, group: GroupRanks, what: str, silent: Sequence[RankHandle], stacks: Mapping[int, str]
    ) -> Path | None:
        """Write a report about the silent ranks of a group, and return its path; None if it cannot be written.

        `what` says what they missed. `stacks` are the Python stacks of the group's ranks, by rank.
        """
        other_groups = [other_group for other_group in self._groups() if other_group is not group]
        all_stacks = dict(stacks) | await _read_all([other_group.read_stacks() for other_group in other_groups])
        thread_states = await _read_all([reported.read_thread_states() for reported in (group, *other_groups)])
        handles = [handle for reported in (group, *other_groups) for handle in reported.handles]
        handles.sort(key=lambda handle: handle.rank)
        first = next((handle for handle in handles if handle in silent), None)
        lines = [
            f"{datetime.now().astimezone().isoformat(timespec='seconds')}: "
            f"{ranks_named(sorted(handle.rank for handle in silent))} {what}",
            f"first silent rank: {first.rank if first else 'unknown'}",
        ]
        for handle in handles:
            lines += [
                f"\n== rank {handle.rank}: threads in the kernel ==",
                thread_states.get(handle.rank) or "unknown",
                f"\n== rank {handle.rank}: Python ==",
                all_stacks.get(handle.rank, "").strip() or "wrote no stack",
            ]
        path = self._unused_path()
        # The machine may have lost its disk; the error must name the silent rank all the same.
        with suppress(OSError):
            append_whole(path, ("\n".join(lines) + "\n").encode(errors="replace"))
            # A debugger pauses a rank. Only this group ends now, so other groups must not be paused.
            most_silent = sorted(group.handles, key=lambda handle: handle not in silent)[: self._most_native]
            native = await asyncio.gather(*(_read_native_stacks(handle) for handle in most_silent))
            for handle, text in zip(most_silent, native, strict=True):
                append_whole(path, f"\n== rank {handle.rank}: native ==\n{text}\n".encode(errors="replace"))
            return path
        return None

    def _unused_path(self) -> Path:
        number = 1
        while (path := self._folder / f"hang_{number}.txt").exists():
            number += 1
        return path


async def _read_all(readings: Sequence[Coroutine[Any, Any, dict[int, str]]]) -> dict[int, str]:
    """Wait for several groups' texts by rank, stacks for example, and return all. A group that fails is left out."""
    answers = await asyncio.gather(*readings, return_exceptions=True)
    return {rank: text for answer in answers if isinstance(answer, dict) for rank, text in answer.items()}


async def _read_native_stacks(handle: RankHandle) -> str:
    """Return a rank's native stacks, or why there are none: the group must end whatever goes wrong here."""
    try:
        return await handle.read_native_stacks(_NATIVE_SECONDS)
    except Exception as error:
        return f"no native stacks: {error!r}"
