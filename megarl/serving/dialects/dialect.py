"""Protocols of a dialect: a wire format of requests for one answer to a conversation.

A dialect has no state and knows neither sessions nor the server. It converts a request to the body of a chat
completion, and an answer to one object or to the events of a stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from megarl.serving.answers import Answer
from megarl.serving.dialects.sampling import RequestParameters
from megarl.serving.refusal import RequestError
from megarl.types import Caller


class Reply(Protocol):
    """Writer of one answer, as one JSON object or as a stream of server-sent events."""

    def make_body(self, answer: Answer, tokens: Sequence[str] | None) -> dict[str, Any]:
        """Return the complete answer. `tokens`: texts of the sampled tokens; None: no log-probs are requested."""
        ...

    def begin(self) -> bytes:
        """Return the first bytes of a stream, sent before the answer is known."""
        ...

    def events(self, answer: Answer, tokens: Sequence[str] | None) -> Iterator[bytes]:
        """Yield the events of an answer, between the bytes of `begin` and `end`."""
        ...

    def waiting(self) -> bytes:
        """Return bytes that keep the stream alive until the answer is ready."""
        ...

    def error_event(self, error: RequestError) -> bytes:
        """Return the event sent in place of an answer, after the stream has begun."""
        ...

    @property
    def end(self) -> bytes: ...


class Dialect(Protocol):
    """A wire format of requests. `page` is its path below `/v1`."""

    @property
    def page(self) -> str: ...

    def convert_to_chat(self, body: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[str]]:
        """Return a request as a chat completion's body, and the names of ignored fields and tools.

        Raises RequestError for an invalid request, and for a field that would change the samples.
        """
        ...

    def caller(self, headers: Mapping[str, str]) -> Caller: ...

    def reply(self, name: str, model: str, parameters: RequestParameters, body: Mapping[str, Any]) -> Reply:
        """Return the object that writes the answer to a request. `name` is the id of the model call."""
        ...

    def error(self, error: RequestError) -> dict[str, Any]: ...
