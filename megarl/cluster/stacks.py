"""What the stacks that a rank's fault handler wrote tell of where it stands."""

from __future__ import annotations

import linecache
import re

_HEADING = "(most recent call first):"
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in ')
_WAIT = re.compile(
    r"\b(wait|barrier|synchronize|broadcast|recv|send|\w*reduce\w*|\w*gather\w*|all_to_all\w*|\w+Store)\("
)


def waits_in_collective(stacks: str) -> bool:
    """Whether the main thread is in a call that waits for other ranks, by stacks in the form of `faulthandler`.

    False where there is no stack: a process that writes none has stopped altogether.
    """
    _, heading, main_thread = stacks.rpartition(_HEADING)  # the main thread comes last
    innermost = _FRAME.search(main_thread)
    if not heading or innermost is None:
        return False
    if "/torch/distributed/" in innermost["file"]:
        return True
    # Calls into C leave no frame: the line that made the call tells.
    return _WAIT.search(linecache.getline(innermost["file"], int(innermost["line"]))) is not None
