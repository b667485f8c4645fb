"""Stacks of ranks, as `faulthandler` writes them: where each rank is, and whether it waits in a collective."""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping, Sequence

_HEADING = "(most recent call first):"
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in ')
_WAIT = re.compile(
    r"\b(wait|barrier|synchronize|broadcast|recv|send|\w*reduce\w*|\w*gather\w*|all_to_all\w*|\w+Store)\("
)
_WAITING_FILES = ("/torch/distributed/", "/megarl/platform/bridge.py", "/megarl/platform/beside.py")
_OUTERMOST = re.compile(r" in (?:<module>|_run_module_as_main)$|^  \.\.\.$", re.MULTILINE)
_MOST_FRAMES = 12
_MOST_STACKS = 8


def is_whole(stacks: str) -> bool:
    """Whether the stacks are complete: the main thread's first frame, or the last frame that is shown, is there."""
    _, heading, main_thread = stacks.rpartition(_HEADING)
    return bool(heading) and _OUTERMOST.search(main_thread) is not None


def summary(stacks: Mapping[int, str]) -> str:
    """The innermost frames of each rank's main thread; ranks with the same stack are listed together."""
    alike: dict[str, list[int]] = {}
    for rank, text in stacks.items():
        _, heading, main_thread = text.rpartition(_HEADING)
        frames = [line for line in main_thread.splitlines() if _FRAME.search(line)] if heading else []
        shown = frames[:_MOST_FRAMES] + ["  ..."] * (len(frames) > _MOST_FRAMES)
        alike.setdefault("\n".join(shown or ["  wrote no stack"]), []).append(rank)
    # First those that stand apart: most ranks wait for them.
    kinds = sorted(alike.items(), key=lambda kind: len(kind[1]))
    lines = ["Where the ranks stood; their logs have all threads:"]
    for frames, ranks in kinds[:_MOST_STACKS]:
        lines += [ranks_named(ranks), frames]
    if rest := sorted(rank for _, ranks in kinds[_MOST_STACKS:] for rank in ranks):
        lines.append(f"{ranks_named(rest)}: elsewhere")
    return "\n".join(lines)


def ranks_named(ranks: Sequence[int]) -> str:
    """Ranks, in ascending order, in words: `rank 3`, `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    told = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(told)}"


def engine_named(ranks: Sequence[int]) -> str:
    """A separate engine replica, in words."""
    return f"the engine of {ranks_named(ranks)}"


def waits_in_collective(stacks: str) -> bool:
    """Whether the main thread is in a call that waits for other ranks.

    False without a stack: a process that writes none is stopped.
    """
    _, heading, main_thread = stacks.rpartition(_HEADING)  # the main thread comes last
    innermost = _FRAME.search(main_thread)
    if not heading or innermost is None:
        return False
    if any(part in innermost["file"] for part in _WAITING_FILES):
        return True
    # Calls into C leave no frame: the line that made the call tells.
    return _WAIT.search(linecache.getline(innermost["file"], int(innermost["line"]))) is not None
