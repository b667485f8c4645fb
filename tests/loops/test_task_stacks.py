"""Stacks of tasks name each coroutine down to the one that waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from megarl.loops.task_stacks import task_stacks


async def numbers(gate: asyncio.Event) -> AsyncIterator[int]:
    await gate.wait()
    yield 1


async def count(gate: asyncio.Event) -> int:
    total = 0
    async for number in numbers(gate):
        total += number
    return total


async def test_stacks_name_coroutines_and_generators_down_to_the_waiting_one() -> None:
    gate = asyncio.Event()
    task = asyncio.create_task(count(gate), name="counter")
    await asyncio.sleep(0)
    stacks = task_stacks(asyncio.get_running_loop())
    gate.set()
    assert await task == 1
    lines = stacks.partition("Task counter:\n")[2].split("\n\n")[0].splitlines()
    assert [line.rpartition(" in ")[2] for line in lines[:2]] == ["count", "numbers"], stacks
    assert "in wait" in stacks and "FutureIter" in stacks
