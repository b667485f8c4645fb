"""A remote call: its encoded commands and its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.cluster.calls.deadlines import Limit
from megarl.cluster.ranks.messages import pack
from megarl.cluster.ranks.rank_handle import Answers, RankHandle


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A remote call in progress."""

    method: str
    limit: Limit
    answers: Answers
    node_futures: Sequence[asyncio.Future[None]]
    """Futures that are done when all ranks have answered."""
    began: float
    """Start of the call, in monotonic seconds."""

    def is_answered(self) -> bool:
        return all(
            node_future.done() and not node_future.cancelled() and node_future.exception() is None
            for node_future in self.node_futures
        )

    def add_answer_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback` with each rank's answer as it arrives, except failed and cancelled ones."""

        def pass_result(answer: asyncio.Future[Any]) -> None:
            if not answer.cancelled() and answer.exception() is None:
                callback(answer.result())

        for answer in self.answers.values():
            answer.add_done_callback(pass_result)

    def silent_handles(self) -> list[RankHandle]:
        return [handle for handle, answer in self.answers.items() if not answer.done()]

    def errors(self) -> list[Exception]:
        finished_answers = [answer for answer in self.answers.values() if answer.done() and not answer.cancelled()]
        return [error for answer in finished_answers if isinstance(error := answer.exception(), Exception)]


def pack_commands(method: str, per_rank: Sequence[Any], args: Sequence[Any]) -> list[bytes]:
    """Encode each rank's command. Ranks with the same first argument share one message."""
    # Keyed by identity: arguments such as lists of batches are not hashable.
    messages: dict[int, bytes] = {}
    for first_argument in per_rank:
        if id(first_argument) not in messages:
            messages[id(first_argument)] = pack((method, (first_argument, *args), {}))
    return [messages[id(first_argument)] for first_argument in per_rank]
