"""Admission of requests to a service by the tokens that wait: of each account, and of all accounts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megarl.service.refusals import BusyError


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Maximum tokens of unfinished requests. A sampling request counts as if each sample had its maximum length."""

    # A training token occupies about 16 bytes of a waiting request: 2 GiB in all. The command has these defaults too.
    tokens: int = 1 << 27
    tokens_per_key: int = 1 << 25


class Admission:
    """Counts the tokens of accepted requests until they finish."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._tokens: Counter[str] = Counter()
        """Tokens of unfinished requests by account."""

    def check(self, owner: str, tokens: int) -> None:
        """Raise BusyError if a request of so many tokens exceeds a limit. An account without any is always accepted."""
        num_tokens, limits = self._tokens[owner], self._limits
        # Otherwise a request above the limit, or other accounts' requests, could keep an account out for ever.
        if not num_tokens:
            return
        if num_tokens + tokens > limits.tokens_per_key:
            raise BusyError(
                f"this key has requests with {num_tokens} tokens waiting, and at most {limits.tokens_per_key}; this "
                f"one has {tokens}. Send it again when others have finished"
            )
        if self._tokens.total() + tokens > limits.tokens:
            raise BusyError(f"all keys together have at most {limits.tokens} tokens waiting; send the request again")

    def add(self, owner: str, tokens: int) -> None:
        self._tokens[owner] += tokens

    def remove(self, owner: str, tokens: int) -> None:
        """Forget a finished request."""
        self._tokens[owner] -= tokens
        if not self._tokens[owner]:
            del self._tokens[owner]
