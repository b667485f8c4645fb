"""Who is late, by which limit: of the verb, of its history, of the recipe's field; and where all ranks stood."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from megarl.cluster.calls.call import Call
from megarl.cluster.calls.deadlines import Deadlines, Limit, run_deadlines
from megarl.cluster.calls.diagnosis import Diagnosis
from megarl.cluster.calls.rank_errors import RankFailedError
from megarl.cluster.ranks.rank_handle import RankHandle
from megarl.cluster.ranks.stacks import is_complete, name_ranks, summarise_stacks, waits_in_collective
from megarl.config import ClusterConfig
from tests.cluster.started import started

SHORTEST, LONGEST = Limit(300.0, "cluster.verb_timeout_seconds"), Limit(1800.0, "cluster.collective_timeout_seconds")


@pytest.mark.parametrize(
    ("history", "limit"),
    [
        pytest.param([], LONGEST, id="never called"),
        pytest.param([0.1, 0.1], LONGEST, id="called twice"),
        pytest.param([0.1, 0.1, 0.1], SHORTEST, id="fast"),
        pytest.param([31.0, 1.0, 1.0], Limit(310.0, SHORTEST.field), id="ten times the slowest"),
        pytest.param([1.0, 1.0, 1.0, 60.0, 1.0], Limit(600.0, SHORTEST.field), id="slower since"),
        pytest.param([500.0, 500.0, 500.0], LONGEST, id="at most the longest"),
    ],
)
def test_a_verb_has_the_deadline_that_fits_its_calls_so_far(history: list[float], limit: Limit) -> None:
    deadlines = Deadlines(SHORTEST, LONGEST)
    for seconds in history:
        deadlines.record_duration("update", seconds)
        deadlines.record_duration("other", 100.0)
    assert deadlines.limit_for("update") == limit


def test_a_shortest_limit_above_the_longest_counts() -> None:
    deadlines = Deadlines(SHORTEST._replace(seconds=4000.0), LONGEST)
    assert deadlines.limit_for("update") == (4000.0, SHORTEST.field)
    for _ in range(3):
        deadlines.record_duration("update", 1000.0)
    assert deadlines.limit_for("update") == (4000.0, SHORTEST.field)


def test_a_run_gives_building_and_checkpoints_limits_of_their_own() -> None:
    cluster = ClusterConfig(
        build_timeout_seconds=7.0,
        checkpoint_timeout_seconds=11.0,
        verb_timeout_seconds=2.0,
        collective_timeout_seconds=5.0,
    )
    deadlines = run_deadlines(cluster)
    for verb in ("save_checkpoint", "finish_checkpoint", "load_checkpoint", "export"):
        assert deadlines.limit_for(verb) == (11.0, "cluster.checkpoint_timeout_seconds")
    assert deadlines.limit_for("__init__") == (7.0, "cluster.build_timeout_seconds")
    assert deadlines.limit_for("update") == (5.0, "cluster.collective_timeout_seconds")
    for _ in range(3):
        deadlines.record_duration("update", 0.1)
        deadlines.record_duration("export", 0.1)
    assert deadlines.limit_for("update") == (2.0, "cluster.verb_timeout_seconds")
    assert deadlines.limit_for("export") == (11.0, "cluster.checkpoint_timeout_seconds")


def test_the_fields_of_limits_are_fields() -> None:
    deadlines = run_deadlines(ClusterConfig())
    limits = [deadlines.limit_for(verb) for verb in ("__init__", "export", "update")]
    for _ in range(3):
        deadlines.record_duration("update", 0.1)
    for seconds, field in [*limits, deadlines.limit_for("update")]:
        section, _, name = field.partition(".")
        assert section == "cluster" and getattr(ClusterConfig(), name) == seconds


@pytest.mark.usefixtures("worker_module", "nothing_left")
async def test_a_verb_that_was_fast_is_given_up_sooner_than_one_that_is_new() -> None:
    async with started() as group:
        group.deadlines = Deadlines(SHORTEST._replace(seconds=1.0), LONGEST._replace(seconds=60.0))
        await group.call("sleep_on", 1, 1.2)  # the first may take longer
        for _ in range(3):
            await group.ask([0, 1], "sleep", [0, 0])
        limit = group.deadlines.limit_for("sleep").seconds
        assert 1.0 <= limit < 60.0  # how much above the shortest, the machine's load decides
        with pytest.raises(RankFailedError) as caught:
            await group.ask([0, 1], "sleep", [0, 600])
        reason = f"did not answer `sleep` within {limit:g} s; if it needs longer, raise cluster.verb_timeout_seconds"
        assert caught.value.cause == f"rank 1 of 2 {reason}"


@pytest.mark.usefixtures("worker_module", "nothing_left")
async def test_a_stopped_rank_is_found_long_before_the_deadline_of_a_first_call() -> None:
    async with started() as group:
        group.deadlines = Deadlines(Limit(0.5), Limit(600.0))
        # A rank that works goes on.
        assert await group.ask([0, 1], "sleep", [0, 1.8]) == [None, None]
        os.kill((await group.call("pid"))[1], signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(RankFailedError, match=r"rank 1 of 2 did not answer `product` within \d+ s"):
            await group.call("product", 1)
        # The search begins after half a second. The machine may be busy.
        assert 0.5 < time.monotonic() - began < 60.0


@pytest.mark.usefixtures("worker_module", "nothing_left")
async def test_a_stopped_rank_outside_of_a_call_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started() as group:
        os.kill((await group.call("pid"))[1], signal.SIGSTOP)
        searched: list[list[int]] = []

        async def noted(call: Call, patience_seconds: float) -> tuple[list[RankHandle], Mapping[int, str]]:
            stopped, stacks = await Diagnosis._find_stopped_in_call(group.diagnosis, call, patience_seconds)
            searched.append([handle.rank for handle in stopped])
            return stopped, stacks

        monkeypatch.setattr(group.diagnosis, "_find_stopped_in_call", noted)
        group.deadlines = Deadlines(Limit(0.5), Limit(600.0))
        assert await group.ask([0], "sleep", [2.0]) == [None]
        assert searched and not any(searched)


@pytest.mark.usefixtures("worker_module", "nothing_left")
async def test_a_search_that_fails_is_logged_and_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with started() as group:
        logged: list[dict[str, object]] = []
        # asyncio's own handler writes to its log.
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        failing = AsyncMock(side_effect=OSError("stale file handle"))
        monkeypatch.setattr(group.diagnosis, "_find_stopped_in_call", failing)
        group.deadlines = Deadlines(Limit(0.5), Limit(600.0))
        go = tmp_path / "go"
        calling = asyncio.create_task(group.call("wait_for", str(go)))
        async with asyncio.timeout(60):
            while failing.await_count < 2:
                await asyncio.sleep(0.05)
        go.touch()
        await calling
    assert {str(one["message"]) for one in logged} == {"the search for stopped ranks in `wait_for` failed"}
    assert all(str(one["exception"]) == "stale file handle" for one in logged)


@pytest.mark.usefixtures("worker_module", "nothing_left")
async def test_the_end_of_a_rank_during_a_search_is_named_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started() as group:
        pids = await group.call("pid")
        searching = asyncio.Event()

        async def searched(*_: object) -> tuple[list[RankHandle], dict[int, str]]:
            searching.set()
            await asyncio.sleep(600)
            return [], {}

        monkeypatch.setattr(group.diagnosis, "_find_stopped_in_call", searched)
        group.deadlines = Deadlines(Limit(0.5), Limit(600.0))
        calling = asyncio.create_task(group.call("sleep", 600))
        await asyncio.wait_for(searching.wait(), 60)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RankFailedError, match="rank 1 of 2 was killed by SIGKILL"):
            await asyncio.wait_for(calling, 60)


@pytest.mark.usefixtures("worker_module", "nothing_left")
async def test_the_budget_of_a_call_is_added_to_its_deadline_and_is_not_history() -> None:
    async with started() as group:
        group.deadlines = Deadlines.for_all_methods(1.0)
        assert await group.ask([1], "sleep", [1.5], budget_seconds=1.5) == [None]
        assert await group.scatter("sleep", [0.0, 1.5], budget_seconds=1.5) == [None, None]
        group.deadlines = Deadlines(Limit(1.0), Limit(60.0))
        for _ in range(3):
            await group.ask([1], "sleep", [1.5], budget_seconds=1.5)
        limit = group.deadlines.limit_for("sleep").seconds
        assert limit < 15.0  # ten times what the calls took beyond their budgets
        with pytest.raises(RankFailedError, match=f"did not answer `sleep` within {limit:g} s"):
            await group.ask([1], "sleep", [60])


@pytest.mark.usefixtures("worker_module", "nothing_left")
async def test_who_is_late_is_told_with_the_stacks_of_all_ranks(tmp_path: Path) -> None:
    go = str(tmp_path / "go")

    async with started(4, log_folder=tmp_path) as group:
        await group.call("join_gloo")
        waiting = asyncio.create_task(group.ask([3], "wait_for", [go]))
        await asyncio.sleep(0)
        group.deadlines = Deadlines.for_all_methods(1.0, "cluster.verb_timeout_seconds")
        with pytest.raises(RankFailedError) as caught:
            await group.ask([0, 1], "sleep_on", [1, 1], 60)  # rank 0 answers, rank 2 has nothing to do
        late = "did not answer `sleep_on` within 1 s; if it needs longer, raise cluster.verb_timeout_seconds"
        assert (caught.value.rank, caught.value.cause) == (1, f"rank 1 of 4 {late}")
        where, log = caught.value.__notes__
        kinds = where.split("\nrank")
        assert any(kind.startswith(" 1\n") and "in sleep_on" in kind for kind in kinds)
        assert any(kind.startswith(" 3\n") and "in wait_for" in kind for kind in kinds)
        assert any(kind.startswith("s 0, 2\n") and "in serve" in kind for kind in kinds)
        assert "in sleep_on" in log and "rank_0001.log" in log
        with pytest.raises(RankFailedError) as other:
            await waiting
        assert other.value is caught.value


MAIN = """
Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007e (most recent call first):
  File "/x/probe.py", line {line} in sleep_on
  File "/x/rank.py", line 90 in _execute
  File "<frozen runpy>", line 198 in _run_module_as_main
"""


def test_ranks_that_stand_alike_are_told_together_and_few_stacks_are_shown() -> None:
    stacks = {rank: MAIN.format(line=5 if rank == 2 else 7) for rank in range(6)} | {6: "", 7: "a line of another's\n"}
    summary_lines = summarise_stacks(stacks).splitlines()
    assert summary_lines[1:6] == [
        "rank 2",
        '  File "/x/probe.py", line 5 in sleep_on',
        '  File "/x/rank.py", line 90 in _execute',
        '  File "<frozen runpy>", line 198 in _run_module_as_main',
        "ranks 6, 7",
    ]
    assert summary_lines[6:8] == ["  wrote no stack", "ranks 0, 1, 3-5"]
    many = summarise_stacks({rank: MAIN.format(line=rank) for rank in range(100)}).splitlines()
    assert len(many) < 40 and many[-1] == "ranks 8-99: elsewhere"


@pytest.mark.parametrize(("num_more", "num_lines"), [(9, 12), (10, 13), (40, 13)])
def test_dots_stand_for_the_frames_of_a_stack_beyond_12(num_more: int, num_lines: int) -> None:
    frame = '  File "/x/rank.py"'
    deep = MAIN.format(line=1).replace(frame, '  File "/x/a.py", line 1 in f\n' * num_more + frame)
    lines = summarise_stacks({0: deep}).splitlines()[2:]
    assert len(lines) == num_lines and (lines[-1] == "  ...") == (num_lines > 12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", False),
        ('  File "/torch/distributed/x.py", line 3 in f\n', False),
        ("Thread 1 (most recent call first):\n", False),
        ('Thread 1 (most recent call first):\n  File "/torch/distributed/x.py", line 3 in f\n', True),
        ('Thread 1 (most recent call first):\n  File "/x/probe.py", line 3 in f\n', False),
    ],
    ids=["nothing", "no stack", "no frame", "in a collective", "elsewhere"],
)
def test_only_a_main_thread_s_frame_shows_a_wait_for_others(text: str, expected: bool) -> None:
    assert waits_in_collective(text) is expected


def test_stacks_are_whole_when_the_main_thread_is_shown_to_its_beginning() -> None:
    whole = MAIN.format(line=5)
    assert is_complete(whole) and is_complete(whole + "a line of another thread\n")
    lines = whole.splitlines()
    assert not any(is_complete("\n".join(lines[:end])) for end in range(len(lines)))


@pytest.mark.usefixtures("worker_module", "nothing_left")
async def test_an_ended_rank_is_not_taken_for_one_of_a_silent_agent() -> None:
    async with started() as group:
        (_, pid), handle = await group.call("pid"), group.ranks.handles[1]
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait_for(asyncio.shield(handle.died), 60)
        texts = await group.diagnosis.read_native_stacks([handle], 1)
        assert texts == {1: "no native stacks: the process has ended"}


def test_ranks_are_named() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([0, 1]) == "ranks 0, 1"
    assert name_ranks([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7, 8"
