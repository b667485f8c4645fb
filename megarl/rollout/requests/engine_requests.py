"""Requests to engine replicas, and completions sampled in several parts."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from megarl.cluster.ranks.stacks import name_engine
from megarl.data.token_batch import join_retained
from megarl.rewards.scoring.http_rewards import COUNTED_FOR
from megarl.rollout.stragglers import Pace
from megarl.types import Completion, Request

OnLoss = Callable[[int, bool], None]
"""Callback for an engine that is lost with a request: (number of tokens known to be sampled there, whether these are
all). The tokens are in no completion.
"""
Queue = OrderedDict[str, Request]
"""Waiting requests by id, first in first out. Any of them can be removed in constant time."""


class Generates(Protocol):
    """A source of completions: `EnginePool` samples them, `AttemptEngine` also replays recorded ones."""

    async def generate(
        self,
        request: Request,
        *,
        affinity: str | None = None,
        is_last: bool = False,
        on_begun: Callable[[int], None] | None = None,
        on_abort: Callable[[int], None] | None = None,
        on_loss: OnLoss | None = None,
    ) -> Completion:
        """Sample one completion.

        - `affinity`: the trajectory's name. The trajectory's requests prefer the replica that has its prefix cached.
        - `is_last`: no request of this trajectory follows.
        - `on_begun`: called at the start with the number of tokens of this completion that were counted before.
        - `on_abort`: called once if this call is cancelled or fails, perhaps after this call has ended, with the number
          of sampled tokens. Tokens passed to `on_loss` do not count.
        - `on_loss`: called for each engine lost while it sampled this completion (`OnLoss`).
        """
        ...

    def forget(self, affinity: str) -> None:
        """Remove a finished trajectory from the table of replicas with cached prefixes."""
        ...

    @property
    def seconds_paused(self) -> float: ...

    @property
    def num_begun_tokens(self) -> int:
        """Number of tokens in the journal that belong to unanswered calls of a checkpoint."""
        ...


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A queued or running request, with the tokens sampled before earlier pauses."""

    request: Request
    future: asyncio.Future[tuple[Completion, Replica | None]]
    parts: list[Completion]
    on_abort: Callable[[int], None] | None = None
    on_loss: OnLoss | None = None
    purpose: str = field(default_factory=COUNTED_FOR.get)
    """Whether metrics count the tokens as `training` or `evaluation`."""

    def finish(self, last_part: Completion, replica: Replica | None) -> None:
        self.future.set_result((join_parts([*self.parts, last_part]) if self.parts else last_part, replica))

    def report_abort(self, num_tokens: int) -> None:
        if self.on_abort is not None:
            self.on_abort(num_sampled(self.parts) + num_tokens)


class Replica:
    """An engine replica: its running and waiting requests, and the task stepping its engine."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.running: dict[str, None] = {}
        """Ids of this replica's running requests, in the order of admission. The values are unused."""
        self.waiting: Queue = OrderedDict()
        self.aborts: list[str] = []
        """Ids of cancelled requests to abort in the engine."""
        self.is_lost = False
        self.pump: asyncio.Task[None] | None = None
        """Task that steps the engine."""
        self.pace = Pace()

    @property
    def name(self) -> str:
        return name_engine(self.ranks)

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def is_pumped(self) -> bool:
        return self.pump is not None and not self.pump.done()


def select_live(replicas: Sequence[Replica]) -> list[Replica]:
    return [replica for replica in replicas if not replica.is_lost]


def num_sampled(parts: Sequence[Completion]) -> int:
    return sum(len(part.token_ids) for part in parts)


def make_remaining_request(request: Request, parts: Sequence[Completion]) -> Request:
    """Return a request for the remaining tokens of an interrupted completion. Its prompt includes the tokens so far.

    Its seed derives from the old seed and the number of tokens so far. With the old seed, the engine would repeat its
    random numbers.
    """
    sampled_before = num_sampled(parts)
    if not sampled_before:
        return request
    sampled_parts = [part.token_ids.astype(np.int32) for part in parts]
    return replace(
        request,
        prompt_token_ids=np.concatenate([request.prompt_token_ids, *sampled_parts]),
        sampling=replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - sampled_before),
        seed=seed_of(request.seed, sampled_before),
        num_retained=sampled_before,
    )


def join_parts(parts: Sequence[Completion]) -> Completion:
    """Return the parts joined to one completion.

    The finish reason and the routed experts come from the last part: its prompt included all earlier parts.
    """
    return replace(
        parts[-1],
        token_ids=np.concatenate([part.token_ids for part in parts]),
        rollout_logprobs=np.concatenate([part.rollout_logprobs for part in parts]),
        weight_versions=np.concatenate([part.weight_versions for part in parts]),
        retained_sets=join_retained([(len(part.token_ids), part.retained_sets) for part in parts]),
    )


def seed_of(*parts: object) -> int:
    # Not `hash`: Python randomises it per process, and a resumed run must draw the same.
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1
