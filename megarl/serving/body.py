"""JSON bodies of HTTP requests: reading with a size limit, parsing and checking."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError

from megarl.files.strict_json import MEDIUM, count_values, is_deeper, make_object, refuse_surrogates
from megarl.serving.conversation import MAX_DEPTH
from megarl.serving.refusal import RequestError

Parsed = TypeVar("Parsed")

MAX_BODY_BYTES = 32 << 20
"""Largest accepted body of an HTTP request, in bytes (32 MiB)."""
_BODY_SECONDS = 60.0
"""Seconds until a body must be complete. 32 MiB take that long at 5 Mbit/s."""
_LARGE_BYTES = 64 << 10
"""Bodies from this size on are parsed in a thread. Parsing 64 KiB blocks other clients for about 1 ms."""


async def read_body(request: web.Request) -> tuple[bytes, Mapping[str, Any]]:
    """Return a hash that identifies a request, and the JSON object in its body.

    The hash covers path and object without `stream`: some clients repeat a cut stream as a whole answer. Raises
    RequestError; its status is 400 for an invalid, too deep or unencodable object.
    """
    return await _parse(_identify, await read_bytes(request), request.path)


async def read_json(request: web.Request) -> Mapping[str, Any]:
    """Return the JSON object in a request's body; an empty body gives {}. Raises RequestError."""
    return await parse_json(await read_bytes(request))


async def parse_json(raw: bytes) -> Mapping[str, Any]:
    """Return the JSON object in `raw`; no bytes give {}. Raises RequestError."""
    return await _parse(parse_body, raw or b"{}")


async def read_head(request: web.Request, head: bytearray, num_bytes: int) -> None:
    """Read a body's first `num_bytes`, or all of it, into `head`; `read_bytes` returns the rest.

    Raises RequestError with status 408 or 400. `head` then has the bytes before the fault.
    """
    async with _refuse_read_faults():
        while len(head) < num_bytes and (part := await request.content.read(num_bytes - len(head))):
            head += part


async def read_bytes(request: web.Request) -> bytes:
    """Return a request's body, up to `MAX_BODY_BYTES` in memory: check the client's key first.

    Raises RequestError with status 413 if it is too large, 408 if it does not arrive, 400 if it is malformed.
    """
    # Refuse before a byte is read. Without a length, aiohttp's client_max_size ends the read.
    if request.content_length is not None and request.content_length > MAX_BODY_BYTES:
        raise RequestError(f"the body has {request.content_length} bytes; the limit is {MAX_BODY_BYTES}", status=413)
    async with _refuse_read_faults():
        return await request.read()


@asynccontextmanager
async def _refuse_read_faults() -> AsyncIterator[None]:
    """Turn a fault while reading a body into a RequestError: too slow, too long, or broken."""
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            yield
    except TimeoutError as error:
        raise RequestError(f"the body is not complete after {_BODY_SECONDS:g} seconds", status=408) from error
    except web.HTTPRequestEntityTooLarge as error:
        raise RequestError(f"the body has more than {MAX_BODY_BYTES} bytes", status=413) from error
    except (HttpProcessingError, ClientPayloadError, web.RequestPayloadError) as error:
        raise RequestError(f"the body cannot be read: {type(error).__name__}: {error!s:.200}") from error


async def _parse(parser: Callable[..., Parsed], raw: bytes, *args: Any) -> Parsed:
    if len(raw) < _LARGE_BYTES:
        return parser(raw, *args)
    return await asyncio.to_thread(parser, raw, *args)


def _identify(raw: bytes, path: str) -> tuple[bytes, Mapping[str, Any]]:
    body = parse_body(raw)
    content = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    return hashlib.sha256(json.dumps([path, content], sort_keys=True).encode()).digest(), body


def parse_body(raw: bytes) -> Mapping[str, Any]:
    """Parse the JSON object in `raw`. Raises RequestError: 400 for an invalid one, 413 for too many values."""
    # Python's JSON parser holds the interpreter lock, in a thread too: 10 million empty lists take 4 s. A million
    # values are more than the context of any model, as text or as token ids.
    if count_values(raw) > MEDIUM:
        raise RequestError(f"the body is too complex: it has more than {MEDIUM} values", status=413)
    try:
        body = json.loads(raw.decode(), object_pairs_hook=make_object)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error!s:.200}") from error
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object")
    if is_deeper(body, MAX_DEPTH):
        raise RequestError(f"the body has objects or lists nested more than {MAX_DEPTH} levels deep")
    # In valid UTF-8 only an escape, such as \ud800, can write half of a surrogate pair.
    if b"\\u" in raw:
        try:
            refuse_surrogates(body)
        except ValueError as error:
            raise RequestError(f"the body has text that UTF-8 cannot encode: {error}; leave it out") from error
    return body
