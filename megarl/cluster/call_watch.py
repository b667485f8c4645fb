"""Watches a remote call: names slow ranks, and ends the group before the deadline if a rank is suspended."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from megarl.cluster.call import Call
from megarl.cluster.deadlines import Deadlines
from megarl.cluster.rank_handle import RankHandle, names_of
from megarl.cluster.stacks import is_complete, summary, waits_in_collective

_LOOK_SECONDS = 0.1
"""Minimum seconds between two checks of a call."""


class Ranks(Protocol):
    """A group of ranks; `WorkerGroup` implements it."""

    deadlines: Deadlines
    on_slow: Callable[[str], object]

    def clock(self) -> float: ...

    @property
    def num_ranks(self) -> int: ...

    async def read_stacks(self) -> dict[int, str]: ...

    async def find_stopped(self, call: Call, patience_seconds: float) -> tuple[list[RankHandle], Mapping[int, str]]: ...

    async def end_silent(self, what: str, silent: Sequence[RankHandle], stacks: Mapping[int, str]) -> None: ...


async def watch(group: Ranks, call: Call, budget_seconds: float, extra_seconds: float) -> None:
    """Report the ranks delaying a call, once per call. End the group of ranks if one of them is suspended.

    The first calls of a method have a long deadline, and a suspended process would hold up the run that long. So the
    search for suspended processes repeats at intervals of the shortest deadline. `budget_seconds` is the working time
    planned for this call. `extra_seconds` is everything that extends its deadline, `budget_seconds` included.
    """
    pause, deadline = group.deadlines.shortest.seconds, call.started + call.limit.seconds
    late_at = call.started + group.deadlines.late_after(call.method) + extra_seconds
    search_at = call.started + budget_seconds + pause
    # At the deadline, the call itself names the silent ranks.
    while (next_at := min(late_at, search_at)) < deadline:
        if (left := next_at - group.clock()) > 0:
            await asyncio.sleep(max(_LOOK_SECONDS, left))
            continue
        seconds = group.clock() - call.started
        try:
            if next_at == late_at:
                late_at = math.inf
                await _report_slow(group, call, seconds)
            else:
                await _end_stopped(group, call, seconds, (call.limit.seconds - extra_seconds) / 2)
                search_at = group.clock() + pause
        except Exception as error:
            # A log that cannot be read must neither end the run nor later searches. asyncio logs the error.
            search_at = group.clock() + pause
            message = f"the search for stopped ranks in `{call.method}` failed"
            asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})


async def _end_stopped(group: Ranks, call: Call, seconds: float, patience_seconds: float) -> None:
    """End the group if a rank of a call is suspended. The call has lasted for `seconds`."""
    stopped, stacks = await group.find_stopped(call, patience_seconds)
    if stopped:
        await group.end_silent(f"did not answer `{call.method}` within {seconds:.0f} s", stopped, stacks)


async def _report_slow(group: Ranks, call: Call, seconds: float) -> None:
    """Report the ranks delaying a call, `seconds` after its start."""
    stacks = await group.read_stacks()
    silent = call.silent()
    slow = [h for h in silent if is_complete(stacks[h.rank]) and not waits_in_collective(stacks[h.rank])]
    # Where all ranks work, none is slower than its peers: the call has more to do than earlier ones.
    if slow and len(slow) < len(call.answers) and not call.errors():
        group.on_slow(
            f"{names_of(slow)} of {group.num_ranks} {'is' if len(slow) == 1 else 'are'} slow in "
            f"`{call.method}`: other ranks wait after {seconds:.0f} s, the deadline is {call.limit.seconds:.0f} s\n"
            + summary({handle.rank: stacks[handle.rank] for handle in slow})
        )
