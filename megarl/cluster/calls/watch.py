"""The watch of a remote call for slow and suspended ranks."""

from __future__ import annotations

import asyncio
import math
import time

from megarl.cluster.calls.call import Call
from megarl.cluster.calls.deadlines import Deadlines
from megarl.cluster.calls.group_end import GroupEnd
from megarl.cluster.calls.group_ranks import GroupRanks
from megarl.cluster.ranks.rank_handle import names_of
from megarl.cluster.ranks.stacks import is_complete, summary, waits_in_collective


async def watch(
    call: Call,
    ranks: GroupRanks,
    end: GroupEnd,
    deadlines: Deadlines,
    *,
    budget_seconds: float,
    extra_seconds: float,
) -> None:
    """Report the ranks delaying a call, once per call. End their group if one of them is suspended.

    The first calls of a method have a long deadline, and a suspended process would hold up the run that long. So the
    search for suspended processes repeats at intervals of the shortest deadline. `budget_seconds` is the working time
    planned for this call. `extra_seconds` is everything that extends its deadline, `budget_seconds` included.
    """
    pause, deadline = deadlines.shortest.seconds, call.started + call.limit.seconds
    late_at = call.started + deadlines.late_after(call.method) + extra_seconds
    search_at = call.started + budget_seconds + pause
    # At the deadline, the call itself names the silent ranks.
    while (next_at := min(late_at, search_at)) < deadline:
        if (left := next_at - time.monotonic()) > 0:
            await asyncio.sleep(left)
            continue
        seconds = time.monotonic() - call.started
        try:
            if next_at == late_at:
                late_at = math.inf
                await _report_slow(call, ranks, seconds)
            else:
                patience_seconds = (call.limit.seconds - extra_seconds) / 2
                stopped, stacks = await ranks.find_stopped(call, patience_seconds)
                if stopped:
                    await end.because_stopped(f"did not answer `{call.method}` within {seconds:.0f} s", stopped, stacks)
                search_at = time.monotonic() + pause
        except Exception as error:
            # A log that cannot be read must neither end the run nor later searches. asyncio logs the error.
            search_at = time.monotonic() + pause
            message = f"the search for stopped ranks in `{call.method}` failed"
            asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})


async def _report_slow(call: Call, ranks: GroupRanks, seconds: float) -> None:
    """Report the ranks delaying a call, `seconds` after its start."""
    stacks = await ranks.read_stacks()
    silent = call.silent()
    slow = [h for h in silent if is_complete(stacks[h.rank]) and not waits_in_collective(stacks[h.rank])]
    # Where all ranks work, none is slower than its peers: the call has more to do than earlier ones.
    if slow and len(slow) < len(call.answers) and not call.errors():
        ranks.on_slow(
            f"{names_of(slow)} of {ranks.part.num_ranks} {'is' if len(slow) == 1 else 'are'} slow in "
            f"`{call.method}`: other ranks wait after {seconds:.0f} s, the deadline is {call.limit.seconds:.0f} s\n"
            + summary({handle.rank: stacks[handle.rank] for handle in slow})
        )
