"""Protocols of a dialect: a wire format of requests for one answer to a conversation.

A dialect has no state and knows neither sessions nor the server. It turns a request into the body of a chat completion,
the endpoint's own form, and an answer into an object or into the events of a stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from megarl.serving.answers import Answer
from megarl.serving.dialects.sampling import Asked
from megarl.serving.refusal import RequestError
from megarl.types import Caller


class Reply(Protocol):
    """Writer of the answer to one request, as one JSON object or as a stream of server-sent events."""

    def make_body(self, answer: Answer, tokens: Sequence[str] | None) -> dict[str, Any]:
        """Return the complete answer. `tokens` are the texts of the sampled tokens, if log-probs are requested."""
        ...

    def begin(self) -> bytes:
        """Return the first bytes of a stream, before anything is known of its answer."""
        ...

    def events(self, answer: Answer, tokens: Sequence[str] | None) -> Iterator[bytes]:
        """Yield all events of a streamed answer, between those of `begin` and `end`."""
        ...

    def waiting(self) -> bytes:
        """Return what keeps the stream alive while its answer is not ready."""
        ...

    def error_event(self, error: RequestError) -> bytes:
        """Return the event in place of an answer, after the stream has begun."""
        ...

    @property
    def end(self) -> bytes:
        """Return the last bytes of a stream."""
        ...


class Dialect(Protocol):
    """A wire format. `page` is its path below `/v1`."""

    @property
    def page(self) -> str: ...

    def as_chat(self, body: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[str]]:
        """Return a request as the body of a chat completion, and the names of fields and tools without effect.

        Raises RequestError for an invalid request, and for a field that would change the samples.
        """
        ...

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Return the agent that made a request, as far as its headers say."""
        ...

    def reply(self, name: str, model: str, asked: Asked, body: Mapping[str, Any]) -> Reply:
        """Return the writer of the answer to a request. `name` is unique for each model call of the endpoint."""
        ...

    def error(self, error: RequestError) -> dict[str, Any]:
        """Return the body of a refused request."""
        ...
