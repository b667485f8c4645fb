"""`megarl train`, which writes where its main task stands once a rank has written where it stands.

Arguments: a folder, then those of `megarl`. The rank's `rank.json` and the driver's `driver.json` in that folder are
lists of [function, file], outermost first, of the functions of megarl.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import megarl

ROOT = Path(megarl.__file__).parents[1]
PATIENCE_SECONDS = 240.0


def own_functions(codes: Iterable[CodeType]) -> list[tuple[str, str]]:
    """The functions of megarl among these, and their files as they are named from the repository."""
    named = [(code.co_qualname.replace(".<locals>", ""), Path(code.co_filename)) for code in codes]
    return [
        (name, str(file.relative_to(ROOT)))
        for name, file in named
        if file.is_relative_to(ROOT / "megarl") and name != "<module>"
    ]


def stack(innermost: FrameType | None) -> list[FrameType]:
    """A thread's frames, outermost first."""
    frames = []
    while innermost is not None:
        frames.append(innermost)
        innermost = innermost.f_back
    return frames[::-1]


def awaited(coroutine: Any) -> Iterator[CodeType]:
    """The functions that a coroutine is suspended in, from itself to the innermost."""
    while hasattr(coroutine, "cr_code"):
        yield coroutine.cr_code
        coroutine = coroutine.cr_await


def write(file: Path, functions: list[tuple[str, str]]) -> None:
    """Whole, or not at all: who waits for the file reads it at once."""
    partial = file.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(functions))
    partial.replace(file)


def wait_for(file: Path) -> None:
    """Until the file is there."""
    last_look = time.monotonic() + PATIENCE_SECONDS
    while not file.exists():
        if time.monotonic() > last_look:
            raise TimeoutError(f"{file} was not written within {PATIENCE_SECONDS:g} s")
        time.sleep(0.02)


def watch(folder: Path, main_thread: int) -> None:
    """Write the driver's functions while a rank waits for that inside its loss."""
    wait_for(folder / "rank.json")
    frames = stack(sys._current_frames()[main_thread])
    [loop] = [frame for frame in frames if frame.f_code.co_name == "run_until_complete"]
    entered = [frame.f_code for frame in frames[: frames.index(loop)]]
    task = loop.f_locals["future"]
    # The rank may enter its loss before the driver, which has just sent the command, waits for the answer.
    while task.get_coro().cr_running:
        time.sleep(0.02)
    write(folder / "driver.json", own_functions([*entered, *awaited(task.get_coro())]))


if __name__ == "__main__":
    arguments = sys.argv[2:]
    # As under `python -m megarl`: other runs of this search path share their fork server with this one.
    sys.path[0] = os.getcwd()
    threading.Thread(target=watch, args=(Path(sys.argv[1]), threading.get_ident()), daemon=True).start()
    from megarl.cli import main

    main(arguments)
