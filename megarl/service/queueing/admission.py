"""Admission of requests to a service. A request is refused if too much work is waiting.

Limits count the tokens and bytes of each account, and the tokens of all accounts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from megarl.service.refusals import BusyError

BODY_BYTES: ContextVar[int] = ContextVar("BODY_BYTES", default=0)
"""Size in bytes of the current request's body. The routes set it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Maximum tokens and bytes of unfinished requests.

    A sampling request counts as if each sample had its maximum length.
    """

    # A training token occupies about 16 bytes of a waiting request: 2 GiB in all. The command has the same defaults.
    tokens: int = 1 << 27
    tokens_per_key: int = 1 << 25
    # SDK 0.38 sends a call in chunks of 5 MB, which wait for the first chunk. About 400 chunks fit.
    bytes_per_key: int = 2 << 30


class Admission:
    """Counts tokens and bytes of accepted requests until they finish, and bytes of bodies during the read."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._tokens: Counter[str] = Counter()
        """Tokens of unfinished requests by account."""
        self._bytes: Counter[str] = Counter()
        """Bytes of the bodies of unfinished requests by account."""
        self._read_bytes: Counter[str] = Counter()
        """Bytes of the bodies now being read, by account."""

    def check_tokens(self, owner: str, tokens: int) -> None:
        """Raise BusyError if a request of this many tokens would exceed a limit of the account, or of all accounts.

        The only request of an account is never refused.
        """
        num_tokens, limits = self._tokens[owner], self._limits
        # Otherwise the limit, or other accounts' requests, could keep an account out for ever.
        if not num_tokens:
            return
        if num_tokens + tokens > limits.tokens_per_key:
            raise BusyError(
                f"requests of this key with {num_tokens} tokens are waiting, and the limit is {limits.tokens_per_key}; "
                f"this request has {tokens} tokens. Send it again when others have finished"
            )
        if self._tokens.total() + tokens > limits.tokens:
            raise BusyError(
                f"the queue is full: requests of all keys may have {limits.tokens} tokens together; send it again later"
            )

    def has_room(self, owner: str, num_bytes: int) -> bool:
        return self._bytes[owner] + num_bytes <= self._limits.bytes_per_key

    def full_queue_message(self, owner: str, num_bytes: int) -> str:
        return (
            f"requests of this key with {self._bytes[owner] / 2**20:.0f} MiB are waiting, and the limit is "
            f"{self._limits.bytes_per_key / 2**20:.0f} MiB; this request has {num_bytes / 2**20:.1f} MiB. Send smaller "
            "calls, or wait for the results of earlier ones"
        )

    @contextmanager
    def count_while_reading(self, owner: str, num_bytes: int) -> Iterator[None]:
        """Count a request's body while it is read.

        Raises BusyError if the bodies that an account sends now exceed its limit of bytes.
        """
        # An account may always send one body, whatever the limit.
        if self._read_bytes[owner] and self._read_bytes[owner] + num_bytes > self._limits.bytes_per_key:
            raise BusyError(
                f"this key is sending {self._read_bytes[owner] / 2**20:.0f} MiB, and the limit is "
                f"{self._limits.bytes_per_key / 2**20:.0f} MiB; send the request again"
            )
        self._read_bytes[owner] += num_bytes
        try:
            yield
        finally:
            _subtract(self._read_bytes, owner, num_bytes)

    def add(self, owner: str, *, tokens: int, num_bytes: int) -> None:
        self._tokens[owner] += tokens
        self._bytes[owner] += num_bytes

    def remove(self, owner: str, *, tokens: int, num_bytes: int) -> None:
        _subtract(self._tokens, owner, tokens)
        _subtract(self._bytes, owner, num_bytes)


def _subtract(counts: Counter[str], owner: str, amount: int) -> None:
    counts[owner] -= amount
    if not counts[owner]:
        del counts[owner]
