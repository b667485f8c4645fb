"""A group of ranks before its ranks start, and how a rank judges an error."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.agents.agent_link import Answers
from megarl.cluster.calls import worker_group
from megarl.cluster.calls.group_ranks import PartOfRun
from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.cluster.ranks.rank import _is_lost
from megarl.cluster.ranks.rank_handle import RankHandle


def test_a_group_is_the_whole_run_or_the_part_that_it_gets() -> None:
    whole, part = WorkerGroup(3), PartOfRun(4, 9, bytes(32))
    assert (whole.part.first_rank, whole.part.num_ranks) == (0, 3)
    assert WorkerGroup(3, part).part is part
    # No call has run.
    assert whole.seconds_in_calls == 0.0


async def test_seconds_in_calls_are_those_with_at_least_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr(worker_group, "time", SimpleNamespace(monotonic=lambda: now))
    group = WorkerGroup(2)
    group.ranks.handles = [RankHandle(rank, Path()) for rank in range(2)]
    answers: list[asyncio.Future[None]] = []

    def ask(messages: Mapping[RankHandle, bytes]) -> tuple[Answers, list[asyncio.Future[None]]]:
        answers.append(asyncio.get_running_loop().create_future())
        return dict.fromkeys(messages, answers[-1]), [answers[-1]]

    async def begin(rank: int) -> asyncio.Task[list[Any]]:
        call = asyncio.create_task(group.ask([rank], "work", [None]))
        async with asyncio.timeout(10):
            while len(answers) <= rank:
                await asyncio.sleep(0)
        return call

    monkeypatch.setattr(group.ranks, "ask", ask)
    first = await begin(0)
    now = 12.0
    second = await begin(1)
    now = 15.0
    answers[0].set_result(None)
    await first
    now = 17.0
    assert group.seconds_in_calls == 7.0
    now = 19.0
    answers[1].set_result(None)
    await second
    now = 30.0
    assert group.seconds_in_calls == 9.0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        pytest.param(MemoryError(), True, id="Python's memory"),
        pytest.param(RuntimeError("std::bad_alloc"), True, id="a library's memory"),
        pytest.param(TimeoutError(), True, id="time limit"),
        pytest.param(ValueError("a shape is wrong"), False, id="the program's own fault"),
    ],
)
def test_a_restart_may_help_where_memory_or_time_ran_out(error: Exception, expected: bool) -> None:
    assert _is_lost(error) == expected
