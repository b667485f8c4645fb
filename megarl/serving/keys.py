"""API keys and tokens of HTTP requests."""

from __future__ import annotations

import hmac

from aiohttp import web


def key_of(request: web.Request) -> str:
    """Return a request's bearer token, or Anthropic's `x-api-key`; empty if there is neither."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "").strip()


def is_token(key: str, token: str | None) -> bool:
    """Return whether a key is the server's token. Token None accepts every key."""
    # Compare in constant time, so that answers do not reveal the number of correct characters. aiohttp decodes headers
    # with surrogateescape, so a key may be text that UTF-8 cannot encode.
    return token is None or hmac.compare_digest(key.encode(errors="surrogateescape"), token.encode())
