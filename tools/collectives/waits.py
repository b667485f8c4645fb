"""Execution of the programs of all ranks, to find ranks that wait for each other."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tools.collectives.programs import Call, Job
from tools.collectives.symmetry import reduce_job

_Lane = tuple[int, bool, tuple[int, int] | None]
"""A queue of calls of one communicator: the group, whether it is on the host, and the pair of a single message."""


@dataclass(slots=True)
class _Started:
    """A call that a rank has started. `missing` counts the parts that have not ended."""

    rank: int
    index: int
    call: Call
    lane: _Lane
    missing: int = -1
    """-1 until all earlier calls of the lane have ended on this rank."""
    order: int = 0
    """Number of the call in its lane, on this rank."""

    @property
    def has_ended(self) -> bool:
        return self.missing == 0


class _Execution:
    """Executes programs. A communicator runs its calls in the order of their starts, each rank waits where it waits.

    This is NCCL's behaviour: a kernel starts after the earlier kernels of its communicator, and after all that its rank
    waited for. Kernels of other communicators may run at the same time. A collective ends when all members have started
    it. A message ends when both sides have started it.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._programs = [job.programs[rank.program] for rank in job.ranks]
        self._position = [0] * len(job.ranks)
        self._calls: list[dict[int, _Started]] = [{} for _ in job.ranks]
        self._lanes: list[dict[_Lane, deque[_Started]]] = [{} for _ in job.ranks]
        self._num_started: list[dict[_Lane, int]] = [defaultdict(int) for _ in job.ranks]
        self._arrived: dict[tuple[_Lane, int], list[_Started]] = defaultdict(list)
        self._messages: dict[tuple[_Lane, int, int, bool], deque[_Started]] = defaultdict(deque)
        self._ready: deque[int] = deque(range(len(job.ranks)))
        self._waiting: dict[int, _Started] = {}
        """The call that each blocked rank waits for."""
        self._group_rank = [{rank: place for place, rank in enumerate(group.ranks)} for group in job.groups]

    def run(self) -> list[str]:
        """Execute until no rank can go on. Returns sentences about ranks that did not end, none if all did."""
        while self._ready:
            self._advance(self._ready.popleft())
        return list(self._problems())

    def _advance(self, rank: int) -> None:
        """Execute a rank's program until its end, or until it must wait for a call."""
        steps, calls = self._programs[rank].steps, self._calls[rank]
        position = self._position[rank]
        while position < len(steps):
            step = steps[position]
            if step >= 0:
                self._start(rank, step)
            elif not calls[~step].has_ended:
                self._waiting[rank] = calls[~step]
                break
            else:
                del calls[~step]
            position += 1
        self._position[rank] = position

    def _start(self, rank: int, index: int) -> None:
        """Start a call. It runs after the earlier calls of its lane."""
        call = self._programs[rank].calls[index]
        lane = (self._job.ranks[rank].group(call.group), call.on_host, call.lane)
        started = self._calls[rank][index] = _Started(rank, index, call, lane)
        started.order = self._num_started[rank][lane]
        self._num_started[rank][lane] += 1
        queue = self._lanes[rank].setdefault(lane, deque())
        queue.append(started)
        if len(queue) == 1:
            self._enter(started)

    def _enter(self, started: _Started) -> None:
        """Run a call: it is the first of its lane that has not ended on its rank."""
        if not started.call.is_message:
            started.missing = 1
            members = self._job.groups[started.lane[0]].ranks
            arrived = self._arrived[started.lane, started.order]
            arrived.append(started)
            if len(arrived) == len(members):
                del self._arrived[started.lane, started.order]
                for arrived_call in arrived:
                    self._end_part(arrived_call)
            return
        group_rank = self._group_rank[started.lane[0]][started.rank]
        ends = [(group_rank, peer, True) for peer, _ in started.call.sends]
        ends += [(peer, group_rank, False) for peer, _ in started.call.receives]
        started.missing = len(ends)
        for source, destination, is_send in ends:
            opposites = self._messages[started.lane, source, destination, not is_send]
            if opposites:
                opposite = opposites.popleft()
                self._end_part(opposite)
                self._end_part(started)
            else:
                self._messages[started.lane, source, destination, is_send].append(started)

    def _end_part(self, started: _Started) -> None:
        """Count a part of a call as done. With the last part, the call ends and the next one of its lane runs."""
        started.missing -= 1
        if not started.has_ended:
            return
        rank = started.rank
        if self._waiting.get(rank) is started:
            del self._waiting[rank]
            self._ready.append(rank)
        queue = self._lanes[rank][started.lane]
        queue.popleft()
        if queue:
            self._enter(queue[0])

    def _problems(self) -> Iterator[str]:
        if self._waiting:
            awaited = {rank: self._awaited_ranks(call) for rank, call in self._waiting.items()}
            yield from self._explain_blocked(awaited)
            return
        for rank, calls in enumerate(self._calls):
            for index, started in calls.items():
                if not started.has_ended:
                    yield f"rank {rank} ends, but its {self._text(started, index)} never does"

    def _awaited_ranks(self, started: _Started) -> list[int]:
        """Return the ranks whose calls are missing for a call to end, or for an earlier one of its lane."""
        head = self._lanes[started.rank][started.lane][0]
        group = self._job.groups[started.lane[0]]
        if not head.call.is_message:
            arrived_ranks = {started_call.rank for started_call in self._arrived[head.lane, head.order]}
            return [rank for rank in group.ranks if rank not in arrived_ranks]
        group_rank = self._group_rank[head.lane[0]][head.rank]
        peers = [peer for peer, _ in head.call.sends if head in self._messages[head.lane, group_rank, peer, True]]
        peers += [peer for peer, _ in head.call.receives if head in self._messages[head.lane, peer, group_rank, False]]
        return [group.ranks[peer] for peer in dict.fromkeys(peers)]

    def _explain_blocked(self, awaited: dict[int, list[int]]) -> Iterator[str]:
        """Yield a sentence with the ranks that wait for each other, or for a rank that has ended."""
        path = [min(awaited)]
        while True:
            awaited_ranks = awaited.get(path[-1])
            if not awaited_ranks:
                break
            # A rank that has ended explains the wait; else follow a rank that waits itself.
            nearest = next((rank for rank in awaited_ranks if rank not in awaited), awaited_ranks[0])
            if nearest in path:
                path = [*path[path.index(nearest) :], nearest]
                break
            path.append(nearest)
        is_cycle = path[0] == path[-1] and len(path) > 1
        start = f"{len(awaited)} of {len(self._job.ranks)} ranks never end; "
        start += "these wait for each other: " if is_cycle else ""
        parts = []
        for rank in path[:-1] if is_cycle else path:
            if rank not in self._waiting:
                parts.append(f"rank {rank} has ended after {len(self._programs[rank].calls)} calls")
                continue
            started = self._waiting[rank]
            text = f"rank {rank} waits in {self._text(started, started.index)}"
            head = self._lanes[rank][started.lane][0]
            if head is not started:
                text += f", queued after {self._text(head, head.index)},"
            parts.append(f"{text} for {_list_ranks(awaited[rank])}")
        yield start + "; ".join(parts)

    def _text(self, started: _Started, index: int) -> str:
        return f"call {index}, {started.call}, on {self._job.groups[started.lane[0]]}"


def _list_ranks(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def deadlocks(job: Job) -> list[str]:
    """Execute the programs of all ranks. Returns a sentence naming ranks and calls if some rank cannot end, else none.

    The sentence follows the waits from rank to rank, to a cycle or to a rank that has ended.
    """
    # A few ranks, which stand for all, show whether all end. Only the sentence needs the execution of all.
    few = reduce_job(job)
    if few is not job and not _Execution(few).run():
        return []
    return _Execution(job).run()
