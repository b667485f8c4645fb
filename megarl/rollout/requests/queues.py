"""The requests that wait for an engine replica, and the replicas that trajectories prefer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from megarl.rollout.requests.engine_requests import (
    PendingRequest,
    Queue,
    Replica,
    make_remaining_request,
    num_sampled,
    select_live,
)
from megarl.rounding import divide_up
from megarl.types import Request

_MARGIN = 2
"""Extra requests tolerated on the replica with a trajectory's prefix cached, compared with the least loaded replica.
With more, the trajectory's next request goes to the common queue.
"""


class RequestQueues:
    """A common queue, and a queue per replica. A trajectory's request prefers the replica of its previous one.

    Requests are admitted in the order of arrival, at most `max_running` per replica.
    """

    def __init__(self, replicas: Sequence[Replica], max_running: int) -> None:
        self._replicas, self._max_running = replicas, max_running
        self.common: Queue = OrderedDict()
        self.homes: dict[str, Replica] = {}
        """Replica that has each trajectory's prefix cached, by `affinity`."""
        self._open: set[str] = set()
        """Trajectories that may send another request after the current one, by `affinity` or else by request id."""

    @property
    def num_waiting(self) -> int:
        return len(self.common) + sum(len(replica.waiting) for replica in self._replicas)

    def record_request(self, trajectory_name: str, *, is_last: bool) -> None:
        """Remember whether further requests of a trajectory may follow its current one."""
        if is_last:
            self._open.discard(trajectory_name)
        else:
            self._open.add(trajectory_name)

    def close_trajectory(self, trajectory_name: str) -> None:
        self._open.discard(trajectory_name)

    def forget_trajectory(self, affinity: str) -> None:
        self.homes.pop(affinity, None)
        self._open.discard(affinity)

    def choose_queue(self, affinity: str | None) -> Queue:
        """Return the queue for a trajectory's request: its earlier replica's, or the common one if that is busy."""
        home = self.homes.get(affinity) if affinity is not None else None
        # A lost replica has no pump: a request in its queue would wait for ever.
        if home is None or home.is_lost or home.load > min(r.load for r in select_live(self._replicas)) + _MARGIN:
            return self.common
        return home.waiting

    def put_request(self, pending: PendingRequest, queue: Queue, *, at_front: bool = False) -> None:
        """Queue the remaining tokens of a completion. If its token limit is reached, finish it instead."""
        request_id = pending.request.request_id
        if num_sampled(pending.parts) >= pending.request.sampling.max_new_tokens:
            # The last part now ends the completion.
            pending.finish(replace(pending.parts.pop(), finish_reason="length"), None)
            return
        queue[request_id] = make_remaining_request(pending.request, pending.parts)
        queue.move_to_end(request_id, last=not at_front)

    def admit_requests(self, replica: Replica) -> tuple[Request, ...]:
        """Dequeue the requests that a replica may start: its own queue first, then its share of the common queue."""
        num_unfinished = len(self.common) + sum(r.load for r in self._replicas)
        # Each replica takes at most an even share, rounded up. Otherwise the first pump to run would drain the common
        # queue.
        max_share = divide_up(num_unfinished, by=len(select_live(self._replicas)))
        num_admitted = min(len(replica.waiting), self._max_running - len(replica.running))
        new_requests = [replica.waiting.popitem(last=False)[1] for _ in range(num_admitted)]
        num_free = min(self._max_running, max_share) - len(replica.running) - len(new_requests)
        new_requests += [self.common.popitem(last=False)[1] for _ in range(min(len(self.common), num_free))]
        replica.running |= dict.fromkeys(request.request_id for request in new_requests)
        return tuple(new_requests)

    def remove_request(self, request_id: str) -> None:
        self.common.pop(request_id, None)
        for replica in self._replicas:
            replica.waiting.pop(request_id, None)

    def forget_homes(self) -> None:
        """Forget which replica has a trajectory's prefix cached, and move all waiting requests to the common queue."""
        self.homes.clear()
        for replica in self._replicas:
            while replica.waiting:
                # Pop the newest first and put each at the front. So the common queue keeps the original order.
                request_id, request = replica.waiting.popitem()
                self.common[request_id] = request
                self.common.move_to_end(request_id, last=False)

    def forget_homes_in(self, replica: Replica) -> None:
        self.homes = {affinity: home for affinity, home in self.homes.items() if home is not replica}

    def choose_completions_per_report(self, replica: Replica) -> int | None:
        """Return the number of finished completions after which the engine returns; None: only at the time limit.

        Each return costs driver and engine as much time as some sampled tokens.
        """
        may_follow = self.common or replica.waiting or self._open
        # An eighth of the requests: later turns can start early, but more returns would slow down sampling.
        return max(1, len(replica.running) // 8) if may_follow else None
