"""Stacks that Python's `faulthandler` writes: where a rank is, and whether it waits in a collective."""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping, Sequence

STACKS_SECONDS = 5.0
"""Seconds for a rank to write its stacks."""
_HEADING = "(most recent call first):"
"""End of the line above each thread's frames. faulthandler writes the main thread last."""
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in ')
_WAIT = re.compile(
    r"\b(wait|barrier|synchronize|broadcast|recv|send|\w*reduce\w*|\w*gather\w*|all_to_all\w*|\w+Store)\("
)
"""Calls in source lines that wait for other ranks."""
_WAITING_FILES = ("/torch/distributed/", "/megarl/groups/cross_world.py", "/megarl/platform/background.py")
"""A main thread in a file with such a path waits for other ranks."""
_OUTERMOST = re.compile(r" in (?:<module>|_run_module_as_main)$|^  \.\.\.$", re.MULTILINE)
"""Last line of a complete stack: the outermost frame, or the dots of a cut one."""
_MOST_FRAMES = 12
"""Maximum frames shown of a stack."""
_MOST_STACKS = 8
"""Maximum number of different stacks shown."""


def is_complete(stack_text: str) -> bool:
    """Return whether a rank has written all its stacks: the main thread's outermost frame is there."""
    _, heading, main_thread = stack_text.rpartition(_HEADING)
    return bool(heading) and _OUTERMOST.search(main_thread) is not None


def has_begun(stack_text: str) -> bool:
    """Return whether a rank has begun to write its stacks, so it is not stopped.

    The text may stay incomplete: faulthandler stops at frames that change meanwhile.
    """
    return _HEADING in stack_text


def summarise_stacks(stack_texts: Mapping[int, str]) -> str:
    """Return the innermost frames of each rank's main thread. Ranks with the same stack share an entry."""
    ranks_by_frames: dict[str, list[int]] = {}
    for rank, text in stack_texts.items():
        _, heading, main_thread = text.rpartition(_HEADING)
        frames = [line for line in main_thread.splitlines() if _FRAME.search(line)] if heading else []
        lines_shown = frames[:_MOST_FRAMES] + ["  ..."] * (len(frames) > _MOST_FRAMES)
        ranks_by_frames.setdefault("\n".join(lines_shown or ["  wrote no stack"]), []).append(rank)
    # Rare stacks come first: most ranks only wait for the few ranks elsewhere.
    rarest_first = sorted(ranks_by_frames.items(), key=lambda frames_and_ranks: len(frames_and_ranks[1]))
    lines = ["Where the ranks stood; their logs have all threads:"]
    for frames, ranks in rarest_first[:_MOST_STACKS]:
        lines += [name_ranks(ranks), frames]
    if remaining_ranks := sorted(rank for _, ranks in rarest_first[_MOST_STACKS:] for rank in ranks):
        lines.append(f"{name_ranks(remaining_ranks)}: elsewhere")
    return "\n".join(lines)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ascending ranks as words: `rank 3`, `ranks 0-2, 5`."""
    consecutive_runs: list[list[int]] = []
    for rank in ranks:
        if consecutive_runs and rank == consecutive_runs[-1][-1] + 1:
            consecutive_runs[-1].append(rank)
        else:
            consecutive_runs.append([rank])
    names = [
        f"{consecutive_ranks[0]}-{consecutive_ranks[-1]}"
        if len(consecutive_ranks) > 2
        else ", ".join(map(str, consecutive_ranks))
        for consecutive_ranks in consecutive_runs
    ]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(names)}"


def name_engine(ranks: Sequence[int]) -> str:
    return f"the engine of {name_ranks(ranks)}"


def waits_in_collective(stack_text: str) -> bool:
    """Return whether the main thread waits for other ranks.

    False without a stack: a process that writes none is stopped.
    """
    _, heading, main_thread = stack_text.rpartition(_HEADING)  # the main thread comes last
    innermost = _FRAME.search(main_thread)
    if not heading or innermost is None:
        return False
    if any(part in innermost["file"] for part in _WAITING_FILES):
        return True
    # Calls into C leave no frame, so search the source line of the call.
    return _WAIT.search(linecache.getline(innermost["file"], int(innermost["line"]))) is not None
