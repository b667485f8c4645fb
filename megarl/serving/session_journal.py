"""Journal of a session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from megarl.environments import Message
from megarl.types import Caller, SamplingSettings


class SessionJournal(Protocol):
    """Facts about a session that a later driver needs to continue it, besides the answers."""

    def record_request(self, request_id: str, values: Mapping[str, Any]) -> None:
        """Record a request before its answer."""
        ...

    def record_received(self, request_id: str, clients: int) -> None:
        """Add 1 or -1 to the clients that have read an answer."""
        ...

    async def close_session(self) -> None: ...


def make_request_facts(
    number: int,
    *,
    digest: bytes,
    caller: Caller,
    continued: int | None,
    sampling: SamplingSettings,
    messages: Sequence[Message] = (),
    tools: Sequence[Mapping[str, Any]] = (),
    text: str | None = None,
) -> dict[str, Any]:
    """Return the facts of call `number` for `SessionJournal.record_request`: a chat, or a `text` to complete.

    A chat has only its new `messages`, after the messages of the earlier call `continued`.
    """
    return {
        "number": number,
        "digest": digest.hex(),
        "caller": list(caller),
        "continued": continued,
        "stop": list(sampling.stop),
        "messages": [dict(message) for message in messages],
        "tools": list(tools),
        "text": text,
    }
