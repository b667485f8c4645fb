"""The limit of open files of this process."""

from __future__ import annotations

import os
import resource

from megarl.types import ConfigError

_MOST_OPEN_FILES = 1 << 20
"""Highest limit of open files that megarl sets."""
_OTHER_FILES = 256
"""Number of open files reserved for other uses."""


def allow_open_files(num_files: int) -> int:
    """Raise this process's limit of open files to `num_files`, at most to the hard limit. Return the new limit."""
    limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < num_files:
        limit = min(num_files, hard_limit)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard_limit))
    return limit


def provide_open_files(num_files: int, subject: str) -> None:
    """Raise this process's limit of open files so it can open `num_files` more.

    Raises ConfigError if the hard limit is too low. `subject`, a plural noun, begins the message.
    """
    # Limited to about a million, because some programs close all possible file descriptors one by one.
    num_open = len(os.listdir("/proc/self/fd"))
    allowed = allow_open_files(_MOST_OPEN_FILES)
    if allowed < num_open + num_files + _OTHER_FILES:
        raise ConfigError(
            f"{subject} need {num_files} open files of their agent, which has {num_open} open and reserves "
            f"{_OTHER_FILES} for other uses: the hard limit of open files (RLIMIT_NOFILE, `ulimit -Hn`) is {allowed}; "
            f"raise it to {num_open + num_files + _OTHER_FILES} on the node before the run starts, or start fewer ranks"
        )
