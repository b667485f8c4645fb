"""Errors of a collective that another rank left, told from a rank's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_TEXTS = ("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL")


class PeerGoneError(ConnectionError):
    """A rank that others wait for has ended, or has left what they wait for; `missing` are those that did not come."""

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class OwnWorldError(RuntimeError):
    """A collective of a replica's own ranks failed while they moved weights; its cause is that."""


@contextmanager
def in_own_world() -> Iterator[None]:
    """Within it collectives are those of a replica's own ranks. Raises OwnWorldError where one is left."""
    try:
        yield
    except Exception as error:
        if is_left(error):
            raise OwnWorldError(str(error)) from error
        raise


def told_of_bridge(error: Exception) -> dict[str, Any]:
    """A rank's answer when it leaves a bridge because another has: `lost`, why, and which ranks were `missing` there.

    Raises errors of other kinds, those of its own world among them, again.
    """
    if isinstance(error, OwnWorldError) or not is_left(error):
        raise error
    return {"lost": str(error), "missing": getattr(error, "missing", ())}


def is_left(error: BaseException | None) -> bool:
    """Whether an error or one of its causes is a collective that another rank left."""
    while error is not None:
        names = {f"{c.__module__}.{c.__name__}" for c in type(error).__mro__}
        told = isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)
        if told or isinstance(error, ConnectionError) or "torch.distributed.DistError" in names:
            return True
        error = error.__cause__ or error.__context__
    return False
