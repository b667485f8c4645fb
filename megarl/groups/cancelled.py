"""Registry of cross-world process groups cancelled by the driver after the loss of a rank.

The driver learns of a dead rank at once. Ranks waiting for it in a collective may never notice. gloo loses the error if
a connection breaks in the middle of a message. A stopped rank closes no connection at all.
"""

from __future__ import annotations

from collections.abc import Callable

# One thread receives the driver's messages and writes; threads waiting in collectives read. Each access is a single
# dictionary operation, so no lock is needed.
_reasons: dict[str, str] = {}
_listeners: dict[str, Callable[[], object]] = {}


def cancel(name: str, reason: str) -> None:
    """Cancel the group `name`, so that no thread of this rank waits on it any more. The first reason counts.

    Works before this rank has joined the group too. Callable from any thread; returns without waiting.
    """
    _reasons.setdefault(name, reason)
    if (listener := _listeners.get(name)) is not None:
        listener()


def reason_for(name: str) -> str | None:
    """Return why the group was cancelled; None if it was not."""
    return _reasons.get(name)


def on_cancelled(name: str, listener: Callable[[], object]) -> None:
    """Register a callback for the cancellation of a group. It is called from another thread, or at once if late."""
    # Register before the check: a cancellation in between then calls the listener twice, but never misses it.
    _listeners[name] = listener
    if name in _reasons:
        listener()


def forget(name: str) -> None:
    """Remove the callback of a group after this rank left it."""
    _listeners.pop(name, None)
