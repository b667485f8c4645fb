"""Shuts a group of ranks down, once. All calls then raise the error that ended it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import AsyncExitStack

from megarl.cluster.calls.call import Call
from megarl.cluster.calls.group_ranks import GroupRanks
from megarl.cluster.ranks.rank_handle import RankHandle
from megarl.types import PeerLostError

_LEAVE_SECONDS = 10.0
"""Seconds for ranks to exit by themselves when the group closes."""
_KILL_SECONDS = 10.0
"""Seconds for killed processes to end."""


class GroupEnd:
    """Ends a group once, at the first of `close`, `interrupt` or a fault (`diagnosis.Diagnosis`).

    No rank survives: a rank waiting in a collective for a lost rank cannot leave it in a known state. Other groups
    survive, and so do agents with their copies of the training state.
    """

    def __init__(self, ranks: GroupRanks, calls: Collection[Call]) -> None:
        self._ranks, self._calls = ranks, calls
        self.lost: list[RankHandle] = []
        """Ranks whose loss ended the group."""
        self.resources = AsyncExitStack()
        """Resources to free after the last rank has ended."""
        self._ending: asyncio.Task[Exception] | None = None

    @property
    def has_begun(self) -> bool:
        return self._ending is not None

    async def raise_if_begun(self) -> None:
        if self._ending is not None:
            raise await asyncio.shield(self._ending)

    async def close(self) -> None:
        """End the group without an error: its ranks exit. A busy or slow one is killed."""

        async def dismiss_ranks() -> Exception:
            if not self._calls:
                await self._ranks.dismiss(_LEAVE_SECONDS)
            await self.kill()
            return PeerLostError("the rank processes were already closed when the driver called them")

        await self.run_once(dismiss_ranks)

    async def interrupt(self, method: str, error: BaseException) -> None:
        async def end() -> Exception:
            await self.kill()
            return PeerLostError(f"the call of `{method}` on the ranks was interrupted: {error!r}")

        await self.run_once(end)

    async def run_once(self, end_group: Callable[[], Coroutine[None, None, Exception]]) -> Exception:
        """Run `end_group` unless the group is already ending. Return the error of all later calls.

        `end_group` finds the cause, calls `kill`, and returns the error.
        """
        if self._ending is None:
            self._ending = asyncio.create_task(end_group())
        # Several calls may wait for the end. The shield lets it complete even if some of them are cancelled.
        return await asyncio.shield(self._ending)

    async def kill(self, lost_handles: Sequence[RankHandle] = ()) -> None:
        """Kill all ranks and free the group's resources. `lost_handles` are the cause."""
        self.lost = list(dict.fromkeys(lost_handles))
        for call in self._calls:
            for future in (*call.answers.values(), *call.node_futures):
                future.cancel()
        await self._ranks.kill(_KILL_SECONDS)
        await self.resources.aclose()
