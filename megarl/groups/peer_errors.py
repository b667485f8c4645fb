"""Distinction between errors caused by the loss of another rank, and errors of this rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

# torch raises plain RuntimeErrors for lost peers. Only these parts of the text identify errors of gloo and NCCL.
_TEXTS = ("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL")


class PeerGoneError(ConnectionError):
    """Raised because another rank has ended, or has left a collective or group.

    `missing` lists ranks that never joined the group.
    """

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class ReplicaCollectiveError(RuntimeError):
    """Raised if a collective among one replica's own ranks fails during a reshard. `__cause__` is the
    original error.
    """


@contextmanager
def replica_collectives_marked() -> Iterator[None]:
    """Context for collectives among one replica's own ranks. Raises ReplicaCollectiveError if a peer is lost in one."""
    try:
        yield
    except Exception as error:
        if is_peer_loss(error):
            raise ReplicaCollectiveError(str(error)) from error
        raise


def engine_collectives_marked(group: object | None) -> AbstractContextManager[None]:
    """Return the context `replica_collectives_marked`, or an empty context if `group` is None.

    A `group` connects trainers and engines. Without it all ranks share one world, and any lost rank ends the world.
    """
    return nullcontext() if group is None else replica_collectives_marked()


@dataclass(frozen=True, slots=True)
class LostPeer:
    """A rank's report that another rank left their cross-world process group."""

    reason: str
    missing: tuple[int, ...] = ()
    """Ranks that never joined the group."""


def report_loss(error: Exception) -> LostPeer:
    """Return a rank's report to the driver after a peer left a cross-world process group.

    Raises `error` again if it is of another kind, or a ReplicaCollectiveError.
    """
    if isinstance(error, ReplicaCollectiveError) or not is_peer_loss(error):
        raise error
    return LostPeer(str(error), error.missing if isinstance(error, PeerGoneError) else ())


def is_peer_loss(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is the loss of another rank in a collective."""
    while error is not None:
        # Compare the class by name, because this module does not import torch.
        class_names = {f"{base.__module__}.{base.__name__}" for base in type(error).__mro__}
        is_known_text = isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)
        if is_known_text or isinstance(error, ConnectionError) or "torch.distributed.DistError" in class_names:
            return True
        error = error.__cause__ or error.__context__
    return False
