"""The limit of open files of this process."""

from __future__ import annotations

import os
import resource

from megarl.types import ConfigError

_MOST_OPEN_FILES = 1 << 20
"""Highest limit of open files that megarl sets."""
_OTHER_FILES = 256
"""Number of open files reserved for other uses."""


def allow_open_files(number: int) -> int:
    """Raise this process's limit of open files to `number`, at most to the hard limit. Return the new limit."""
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < number:
        limit = min(number, highest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, highest))
    return limit


def provide_open_files(number: int, subject: str) -> None:
    """Raise this process's limit of open files so it can open `number` more.

    Raises ConfigError if the hard limit is too low. `subject`, a plural noun, begins the message.
    """
    # Limited to about a million, because some programs close all possible file descriptors one by one.
    is_open = len(os.listdir("/proc/self/fd"))
    allowed = allow_open_files(_MOST_OPEN_FILES)
    if allowed < is_open + number + _OTHER_FILES:
        raise ConfigError(
            f"{subject} need {number} open files of their agent, which has {is_open} open and reserves {_OTHER_FILES} "
            f"for other uses: the hard limit of open files (RLIMIT_NOFILE, `ulimit -Hn`) is {allowed}; raise it to "
            f"{is_open + number + _OTHER_FILES} on the node before the run starts, or start fewer ranks"
        )
