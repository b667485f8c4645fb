"""A remote call: its encoded commands, its answers, and its watch for slow and suspended ranks."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megarl.cluster.calls.deadlines import Deadlines, Limit
from megarl.cluster.ranks.messages import pack
from megarl.cluster.ranks.rank_handle import Answers, RankHandle, names_of
from megarl.cluster.ranks.stacks import is_complete, summary, waits_in_collective

_LOOK_SECONDS = 0.1
"""Minimum seconds between two checks of a call."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A remote call in progress: its method, its deadline, and its ranks' answers."""

    method: str
    limit: Limit
    answers: Answers
    awaited: Sequence[asyncio.Future[None]]
    """Futures that are done when all ranks have answered."""
    started: float
    """The group's clock at the start (`WorkerGroup.clock`), in seconds."""

    def is_answered(self) -> bool:
        """Return whether all ranks have answered without an error."""
        return all(part.done() and not part.cancelled() and part.exception() is None for part in self.awaited)

    def is_over(self) -> bool:
        """Return whether all ranks have answered, or one of them has failed."""
        failed = [part for part in self.awaited if part.done() and not part.cancelled() and part.exception()]
        return bool(failed) or all(part.done() for part in self.awaited)

    def on_answers(self, use: Callable[[Any], object]) -> None:
        """Run the callback `use` with each answer as it arrives. Once the call has failed, it no longer runs."""

        def arrived(answer: asyncio.Future[Any]) -> None:
            if not answer.cancelled() and answer.exception() is None:
                use(answer.result())

        for answer in self.answers.values():
            answer.add_done_callback(arrived)

    def silent(self) -> list[RankHandle]:
        """Return the ranks that have not answered."""
        return [handle for handle, answer in self.answers.items() if not answer.done()]

    def errors(self) -> list[Exception]:
        """Return the errors of failed answers. Cancelled answers are not included."""
        ended = [answer for answer in self.answers.values() if answer.done() and not answer.cancelled()]
        return [error for answer in ended if isinstance(error := answer.exception(), Exception)]


def packed(method: str, per_rank: Sequence[Any], args: Sequence[Any]) -> list[bytes]:
    """Return the encoded command for each rank. Ranks with the same first argument, like None, share one."""
    # Keyed by identity: arguments such as lists of batches are not hashable.
    messages: dict[int, bytes] = {}
    for first in per_rank:
        if id(first) not in messages:
            messages[id(first)] = pack((method, (first, *args), {}))
    return [messages[id(first)] for first in per_rank]


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
