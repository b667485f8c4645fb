"""Checks values that come from a run folder and go into a script, a manifest or a command.

Whoever can write a run folder must not be able to write a line of a script that its owner starts.
"""

from __future__ import annotations

import re

from megarl.types import DataError

_HOST_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,252}")
"""Name or address of one host. It excludes lists (a,b), ranges (n[1-9]), options (--x) and characters that a shell
interprets."""


def is_host_name(value: object) -> bool:
    """Return whether a value is the name of one host."""
    return isinstance(value, str) and _HOST_NAME.fullmatch(value) is not None


def host_name(value: object, place: str) -> str:
    """Return the value if it is the name of one host. Raises DataError with its `place` for any other."""
    if not isinstance(value, str) or not is_host_name(value):
        raise DataError(
            f"{place} = {value!r:.80}: is not the name of a host (letters, digits and . _ : -); write the name that "
            "the scheduler uses, or remove the entry"
        )
    return value
