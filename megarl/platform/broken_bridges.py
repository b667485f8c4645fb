"""Bridges that the driver has broken off, because a rank of theirs is lost: by name, told to all that may wait there.

The driver knows at once who has died. Those who wait for a dead rank in a collective may not hear of it: gloo forgets
whom to tell where the connection breaks in the middle of a message, and a stopped rank closes no connection.
"""

from __future__ import annotations

from collections.abc import Callable

_reasons: dict[str, str] = {}
_listeners: dict[str, Callable[[], object]] = {}


def break_off(name: str, reason: str) -> None:
    """Let nobody wait on a bridge any more, whether or not this rank has come to it. From any thread; returns soon."""
    _reasons.setdefault(name, reason)
    if (listener := _listeners.get(name)) is not None:
        listener()


def reason_of(name: str) -> str | None:
    """Why a bridge was broken off; None while it holds."""
    return _reasons.get(name)


def on_broken(name: str, listener: Callable[[], object]) -> None:
    """Have `listener` called, in another thread, when a bridge is broken off; at once if it has been."""
    _listeners[name] = listener
    if name in _reasons:
        listener()


def forget(name: str) -> None:
    """Call no listener of a bridge that was left."""
    _listeners.pop(name, None)
