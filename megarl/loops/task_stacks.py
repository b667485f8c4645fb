"""Shows where the coroutines of an event loop wait. The stack of the loop's thread only shows that the loop waits."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator, Sequence
from types import AsyncGeneratorType
from typing import Any

_AWAITED = ("cr_await", "gi_yieldfrom", "ag_await")
"""Attribute of a coroutine, a generator and an asynchronous generator: the object that it waits for."""
_FRAMES = ("cr_frame", "gi_frame", "ag_frame")


def task_stacks(loop: asyncio.AbstractEventLoop) -> str:
    """Return the stack of each unfinished task of the loop, outermost coroutine first. Call it on the loop's thread."""
    return "".join(f"Task {task.get_name()}:\n{_stack_of(task)}\n" for task in asyncio.all_tasks(loop))


def _stack_of(task: asyncio.Task[Any]) -> str:
    return "".join(f"  {line}\n" for line in _iterate_frames(task.get_coro()))


def _iterate_frames(awaited: Any) -> Iterator[str]:
    """Yield a line for each frame, from a coroutine to the object that it finally waits for."""
    # `Task.get_stack` returns the outermost frame alone, so follow the chain of awaited objects.
    while awaited is not None:
        if (frame := _first_attribute(awaited, _FRAMES)) is not None:
            yield f'File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}'
            awaited = _first_attribute(awaited, _AWAITED)
        elif generators := [value for value in gc.get_referents(awaited) if isinstance(value, AsyncGeneratorType)]:
            # `async for` awaits a step of its generator. No attribute of the step leads to the generator.
            awaited = generators[0]
        else:
            yield repr(awaited)
            return


def _first_attribute(value: Any, names: Sequence[str]) -> Any:
    return next((getattr(value, name) for name in names if hasattr(value, name)), None)
