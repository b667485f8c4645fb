"""Cancellation of cross-world process groups by the driver, after the loss of a rank.

The driver detects a dead rank at once. Ranks waiting for it in a collective may never notice: gloo loses the error if a
connection breaks in the middle of a message. A stopped rank closes no connection.
"""

from __future__ import annotations

from collections.abc import Callable

# One thread receives the driver's messages and writes; threads waiting in collectives read. Each access is a single
# dictionary operation, so no lock is needed.
_reasons: dict[str, str] = {}
_listeners: dict[str, Callable[[], object]] = {}


def cancel(name: str, reason: str) -> None:
    """Cancel the group `name`: all waits of this rank on it end. The first reason is stored.

    Works before the rank has joined the group, and from any thread. Returns without waiting.
    """
    _reasons.setdefault(name, reason)
    if (listener := _listeners.get(name)) is not None:
        listener()


def reason_for(name: str) -> str | None:
    return _reasons.get(name)


def on_cancelled(name: str, listener: Callable[[], object]) -> None:
    """Register a callback for the cancellation of a group. Another thread calls it.

    If the group is already cancelled, this thread calls it now.
    """
    # Registered before the check: a cancellation in between calls the listener twice, but is never missed.
    _listeners[name] = listener
    if name in _reasons:
        listener()


def forget(name: str) -> None:
    _listeners.pop(name, None)
