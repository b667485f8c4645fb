"""The protocol between the driver and its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from megarl.types import PeerLostError


class RankFailedError(PeerLostError):
    """A rank raised, died or fell silent; the message tells which, the cause, and its traceback or log."""

    def __init__(self, rank: int, cause: str, details: str = "") -> None:
        super().__init__("\n".join(filter(None, (cause, details.rstrip()))))
        self.rank = rank
        self.cause = cause


class WorkerGroup(Protocol):
    """Ranks that execute the driver's commands in step: one command at a time, results in order of rank.

    Calls made while another is under way wait for it; the event loop stays free meanwhile. The first failure kills
    the group: a `MegarlError` of a rank keeps its class, anything else raises `RankFailedError`, now and ever after.
    """

    world_size: int

    async def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call the worker's method with the same arguments on every rank."""
        ...

    async def scatter(self, method: str, per_rank: Sequence[Any], *args: Any) -> list[Any]:
        """Call the worker's method with `per_rank[rank]` as first argument on every rank."""
        ...

    async def close(self) -> None:
        """Let the ranks leave; may be called again."""
