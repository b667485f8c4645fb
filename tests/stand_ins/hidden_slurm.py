"""PATH without Slurm's programs: tests without the mark `slurm` see what a machine without Slurm has."""

from __future__ import annotations

import os
import re
from pathlib import Path

PROGRAMS = re.compile(
    r"(slurm|munge).*|(re|un)munge"
    r"|s(acct|acctmgr|alloc|attach|batch|bcast|cancel|control|crontab|diag|info|prio|queue|report|run|share|stat)"
    r"|s(trigger|view)"
)
"""Names of the programs of Slurm and of munge, which checks its messages."""


def path_without_slurm(path: str, folder: Path) -> str:
    """Return a PATH with all programs of `path` but Slurm's.

    A place with some of Slurm's programs is replaced by links to its other programs, in the new `folder`.
    """
    folder.mkdir()
    places = []
    for number, place in enumerate(path.split(os.pathsep)):
        programs = _programs_in(place)
        if any(map(PROGRAMS.fullmatch, programs)):
            links = folder / str(number)
            links.mkdir()
            for name in programs:
                if not PROGRAMS.fullmatch(name):
                    (links / name).symlink_to(Path(place).absolute() / name)
            place = str(links)
        places.append(place)
    return os.pathsep.join(places)


def _programs_in(place: str) -> list[str]:
    """Return the names of a folder's files. A PATH may have folders that do not exist."""
    try:
        return os.listdir(place)
    except OSError:
        return []
