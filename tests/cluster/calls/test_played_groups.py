"""The driver's waits and ends of groups. A test plays the ranks, so no process starts."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest

from megarl.cluster import reshard_calls, run_ranks
from megarl.cluster.agents.agent_link import AgentLink, RankPlace
from megarl.cluster.calls.call import Call
from megarl.cluster.calls.deadlines import Deadlines, Limit
from megarl.cluster.calls.diagnosis import Diagnosis, HangReport
from megarl.cluster.calls.group_end import GroupEnd
from megarl.cluster.calls.group_ranks import GroupRanks, PartOfRun
from megarl.cluster.calls.rank_errors import RankFailedError
from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.cluster.ranks.rank_handle import RankHandle
from megarl.cluster.reshard_calls import ReshardCalls
from megarl.cluster.reshard_states import Event
from megarl.cluster.run_ranks import RunRanks, gather_answers
from megarl.types import PeerLostError

WORKING = 'Thread 1 (most recent call first):\n  File "/x/probe.py", line 3 in <module>\n'
IN_COLLECTIVE = 'Thread 1 (most recent call first):\n  File "/torch/distributed/x.py", line 3 in <module>\n'


class PlayedGroup:
    """The parts of a group of one rank that a run uses. A call raises `error` if it is set."""

    world_size = 1

    def __init__(self, rank: int) -> None:
        self.part = PartOfRun(rank, 2, b"")
        self.ranks = SimpleNamespace(handles=[RankHandle(rank, Path())])
        self.deadlines = Deadlines.for_all_methods(60.0)
        self.error: Exception | None = None
        self.called = asyncio.Event()
        self.asked = asyncio.Event()
        self.diagnosis = SimpleNamespace(end_if_stopped=self._note_search, end_if_overdue=AsyncMock())

    async def ask(self, *_: object, **__: object) -> list[object]:
        self.called.set()
        if self.error is not None:
            raise self.error
        return []

    async def _note_search(self, what: str, patience_seconds: float) -> None:
        self.asked.set()


def played_run() -> tuple[RunRanks, list[PlayedGroup]]:
    """Return the ranks of a run with a trainer and an engine, and their groups."""
    groups = [PlayedGroup(0), PlayedGroup(1)]
    trainers, replica = cast("list[WorkerGroup]", groups)
    return RunRanks(trainers, [replica]), groups


def lose(group: PlayedGroup, error: Exception) -> None:
    """Let the group's rank end. Calls to it raise `error`."""
    group.error = error
    group.ranks.handles[0].record_end("ended", 0.0)


async def test_work_of_the_driver_may_take_longer_than_the_time_for_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_ranks, "_CAUSE_SECONDS", 0.0)
    ranks, _ = played_run()
    assert await ranks.watching(asyncio.sleep(0.05, "scored")) == "scored"


async def test_the_error_of_the_work_is_raised_though_the_watch_sees_the_loss_first() -> None:
    ranks, (trainers, _) = played_run()
    lose(trainers, PeerLostError("rank 0 ended"))

    async def work() -> None:
        await trainers.called.wait()
        # The watch ends in these turns of the event loop.
        for _ in range(5):
            await asyncio.sleep(0)
        raise ValueError("its own call says more")

    with pytest.raises(ValueError, match="its own call says more"):
        await ranks.watching(work())


async def test_work_that_a_loss_cancels_has_ended_when_the_loss_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_ranks, "_CAUSE_SECONDS", 0.0)
    ranks, (trainers, _) = played_run()
    lose(trainers, PeerLostError("rank 0 ended"))
    closed: list[str] = []
    tasks_before = asyncio.all_tasks()

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            closed.append("work")

    with pytest.raises(PeerLostError, match="rank 0 ended"):
        await ranks.watching(work())
    assert closed == ["work"] and asyncio.all_tasks() == tasks_before


async def test_a_lost_replica_leaves_once_and_its_successor_comes_in_its_place() -> None:
    trainers, *replicas = cast("list[WorkerGroup]", [PlayedGroup(rank) for rank in range(3)])
    ranks, lost, error = RunRanks(trainers, replicas), Mock(), PeerLostError("rank 1 ended")
    with pytest.raises(PeerLostError):
        ranks.remove(replicas[0], error)
    ranks.on_lost, ranks.on_removed = lost, Mock()
    for _ in range(2):
        ranks.remove(replicas[0], error)
    assert ranks.replicas == [replicas[1]] and ranks.groups == [trainers, replicas[1]]
    lost.assert_called_once_with(replicas[0], error)
    for group in (replicas[1], trainers):
        with pytest.raises(PeerLostError):
            ranks.remove(group, error)
    ranks.add([successor := cast(WorkerGroup, PlayedGroup(1))])
    assert ranks.replicas == [successor, replicas[1]] and ranks.is_separate


async def test_ranks_are_asked_by_their_number_in_the_run() -> None:
    ranks, groups = played_run()
    for rank, group in enumerate(groups):
        await ranks.ask([rank], "work", [None])
        assert group.called.is_set() and [g.called.is_set() for g in groups].count(True) == rank + 1
    with pytest.raises(PeerLostError, match=r"ranks \[2\] are lost"):
        await ranks.ask([2], "work", [None])


async def test_calls_to_groups_are_answered_together() -> None:
    assert await gather_answers([asyncio.sleep(0.02, "slow"), asyncio.sleep(0, "fast")]) == ["slow", "fast"]


async def test_the_cause_is_raised_though_echoes_of_it_come_first() -> None:
    begun = asyncio.Event()

    async def echo() -> None:
        error = RankFailedError(0, "a peer left the collective")
        error.is_echo = True
        begun.set()
        raise error

    async def fail() -> None:
        await begun.wait()
        for _ in range(5):
            await asyncio.sleep(0)
        raise RankFailedError(1, "the cause")

    with pytest.raises(RankFailedError, match="the cause"):
        await gather_answers([echo(), fail()])


async def test_asyncio_is_silent_about_errors_after_the_first() -> None:
    """Each lost group would add lines to the screen, below the error of the run."""
    noted: list[object] = []
    may_fail = asyncio.Event()

    async def fail(rank: int) -> None:
        if rank:
            await may_fail.wait()
        raise RankFailedError(rank, "lost")

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: noted.append(context.get("exception")))
    try:
        with pytest.raises(RankFailedError, match="lost"):
            await gather_answers([fail(0), fail(1), fail(2)])
        may_fail.set()
        for _ in range(5):
            await asyncio.sleep(0)
        gc.collect()
    finally:
        loop.set_exception_handler(None)
    # Other tests may have left tasks of their own.
    assert [error for error in noted if isinstance(error, RankFailedError)] == []


@pytest.mark.parametrize("can_lose", [True, False])
async def test_stopped_ranks_are_searched_after_a_cancellation_only(
    monkeypatch: pytest.MonkeyPatch, can_lose: bool
) -> None:
    """Where losing an engine ends the run, its own calls find who is stopped."""
    monkeypatch.setattr(reshard_calls, "_LEAVE_SECONDS", 0.0)
    ranks, groups = played_run()
    if can_lose:
        ranks.on_lost = lambda group, error: None
    calls = ReshardCalls(ranks)
    tasks_before = asyncio.all_tasks()
    async with calls._watch_call("reshard", 60.0):
        for _ in range(10):
            await asyncio.sleep(0)
        assert not any(group.asked.is_set() for group in groups)
        calls._cancelled.set()
        for _ in range(10):
            await asyncio.sleep(0)
        assert [group.asked.is_set() for group in groups] == [can_lose] * 2
    # A search that goes on could end a group of the next call.
    assert asyncio.all_tasks() == tasks_before


@pytest.mark.parametrize(("limit", "slack_if_fatal", "slack_if_lost"), [(50.0, 110.0, 120.0), (90.0, 150.0, 150.0)])
async def test_a_reshard_has_time_to_find_and_end_the_group_at_fault(
    monkeypatch: pytest.MonkeyPatch, limit: float, slack_if_fatal: float, slack_if_lost: float
) -> None:
    monkeypatch.setattr(reshard_calls, "_SLACK_SECONDS", 60.0)
    monkeypatch.setattr(reshard_calls, "_BLAME_SECONDS", 60.0)
    ranks, _ = played_run()
    group = Mock(scatter=AsyncMock(return_value=[]))
    calls = ReshardCalls(ranks)
    for expected in (slack_if_fatal, slack_if_lost):
        await calls._make_call(group, "reshard", [True], 3, limit=limit)
        assert group.scatter.await_args.kwargs["slack_seconds"] == expected
        ranks.on_lost = Mock()


@pytest.mark.parametrize(
    ("num_replicas", "can_lose", "expected"), [(2, True, True), (2, False, False), (1, True, False)]
)
async def test_the_first_replica_that_left_is_suspect_if_others_remain(
    num_replicas: int, can_lose: bool, expected: bool
) -> None:
    trainers, *replicas = cast("list[WorkerGroup]", [PlayedGroup(rank) for rank in range(1 + num_replicas)])
    ranks = RunRanks(trainers, replicas)
    ranks.on_lost = Mock() if can_lose else None
    calls = ReshardCalls(ranks)
    # Nobody has left.
    assert not calls._has_suspect(ranks.groups)
    calls._first_to_leave = replicas[0]
    assert calls._has_suspect(ranks.groups) == expected
    # A group of the attempt is lost: its end explains the abort.
    assert not calls._has_suspect([*ranks.groups, trainers])


async def test_a_replica_that_comes_back_needs_a_new_group_of_ranks() -> None:
    ranks, (trainers, replica) = played_run()
    calls = ReshardCalls(ranks)
    for event in (Event.START, Event.ANSWERED):
        calls._states.handle(event)
    calls.add([])
    assert calls.is_connected
    further = PlayedGroup(2)
    calls.add(cast("list[WorkerGroup]", [further]))
    assert not calls.is_connected and ranks.groups == [trainers, replica, further]


class PlayedRanks:
    """The ranks of one group. They answer each request with their text in `texts`, by rank."""

    def __init__(self, texts: Sequence[str], error: Exception | None = None) -> None:
        self.part = PartOfRun(0, len(texts), b"")
        self.handles = [RankHandle(rank, Path()) for rank in range(len(texts))]
        self._texts, self._error = texts, error

    async def request(
        self, do: str, handles: Sequence[RankHandle], patience_seconds: float, **_: object
    ) -> Mapping[RankHandle, str]:
        if self._error is not None:
            raise self._error
        return {handle: self._texts[handle.rank] for handle in handles}


def played_diagnosis(ranks: PlayedRanks, calls: Sequence[Call] = ()) -> tuple[Diagnosis, AsyncMock]:
    """Return the diagnosis of a group, and the mock that stands for its end."""
    run_once = AsyncMock()
    end = cast(GroupEnd, SimpleNamespace(has_begun=False, run_once=run_once))
    return Diagnosis(cast(GroupRanks, ranks), end, calls), run_once


@pytest.mark.parametrize(("stacks", "is_ended"), [(WORKING, True), (IN_COLLECTIVE, False)], ids=["works", "waits"])
async def test_a_late_group_ends_if_its_rank_is_outside_of_a_collective(stacks: str, is_ended: bool) -> None:
    ranks = PlayedRanks([stacks])
    answer = asyncio.get_running_loop().create_future()
    late = Call("reshard", Limit(1.0), {ranks.handles[0]: answer}, (), -math.inf)
    diagnosis, run_once = played_diagnosis(ranks, [late])
    await diagnosis.end_if_overdue("reshard", Limit(1.0))
    assert run_once.await_count == int(is_ended)


async def test_an_answer_that_the_driver_cannot_read_ends_the_group() -> None:
    ranks = PlayedRanks([WORKING])
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    answer.set_exception(ValueError("the answer's class is not there"))
    call = Call("work", Limit(60.0), {ranks.handles[0]: answer}, (), time.monotonic())
    diagnosis, _ = played_diagnosis(ranks, [call])
    end: Any = diagnosis._end
    end.kill = AsyncMock()
    assert await diagnosis._end_call(call) is answer.exception()
    end.kill.assert_awaited_once_with()


async def test_a_call_within_its_limit_ends_no_group() -> None:
    ranks = PlayedRanks([WORKING])
    answer = asyncio.get_running_loop().create_future()
    call = Call("reshard", Limit(600.0), {ranks.handles[0]: answer}, (), time.monotonic())
    diagnosis, run_once = played_diagnosis(ranks, [call])
    await diagnosis.end_if_overdue("reshard", Limit(600.0))
    assert run_once.await_count == 0


@pytest.mark.parametrize(
    ("search_seconds", "late_seconds", "expected"), [(0.01, 30.0, "search"), (30.0, 0.01, "report")]
)
async def test_a_call_is_searched_for_stopped_ranks_and_reported_when_it_is_slow(
    monkeypatch: pytest.MonkeyPatch, search_seconds: float, late_seconds: float, expected: str
) -> None:
    done = asyncio.Queue[str]()

    async def search(*_: object) -> tuple[list[RankHandle], dict[int, str]]:
        await done.put("search")
        await asyncio.sleep(0.01)
        return [], {}

    async def report(*_: object) -> None:
        await done.put("report")
        await asyncio.sleep(0.01)

    ranks = PlayedRanks([WORKING])
    diagnosis, _ = played_diagnosis(ranks)
    monkeypatch.setattr(diagnosis, "_find_stopped_in_call", search)
    monkeypatch.setattr(diagnosis, "_report_slow", report)
    deadlines = SimpleNamespace(shortest=Limit(search_seconds), seconds_until_late=lambda method: late_seconds)
    answer = asyncio.get_running_loop().create_future()
    call = Call("reshard", Limit(60.0), {ranks.handles[0]: answer}, (), time.monotonic())
    watching = asyncio.create_task(
        diagnosis.watch(call, cast(Deadlines, deadlines), budget_seconds=0.0, extra_seconds=0.0)
    )
    assert await asyncio.wait_for(done.get(), 20) == expected
    watching.cancel()


async def test_a_hang_report_leaves_out_a_group_that_fails(tmp_path: Path) -> None:
    ranks = PlayedRanks([WORKING])
    group, _ = played_diagnosis(ranks)
    other, _ = played_diagnosis(PlayedRanks([WORKING], ConnectionError("its agents are lost")))
    report = HangReport(tmp_path, lambda: [group, other])
    path = await report.write(group, "fell silent", ranks.handles, {0: WORKING})
    assert path is not None and "== rank 0: Python ==" in path.read_text()


async def test_stacks_that_an_operator_asks_for_may_fail() -> None:
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
    diagnosis, _ = played_diagnosis(PlayedRanks([WORKING], ConnectionError("its agents are lost")))
    diagnosis.show_stacks()
    for _ in range(5):
        await asyncio.sleep(0)
    gc.collect()
    assert not complaints


class PlayedAgent:
    """An agent with ranks that end some turns of the event loop after the request to end them, unless it is stopped."""

    def __init__(self, *, is_stopped: bool = False) -> None:
        self._is_stopped = is_stopped
        self.is_cut = False

    def kill(self, handles: Sequence[RankHandle]) -> None:
        if not self._is_stopped:
            for handle in handles:
                asyncio.get_running_loop().call_later(0.01, handle.record_end, "was killed", 0.0)

    def cut(self) -> None:
        self.is_cut = True


async def test_only_agents_with_ranks_that_do_not_end_are_cut_off() -> None:
    agents = [PlayedAgent(), PlayedAgent(is_stopped=True)]
    places = [RankPlace(cast(AgentLink, agent), number, 0) for number, agent in enumerate(agents)]
    ranks = GroupRanks(PartOfRun(0, 2, b""), places)
    ranks.handles = [RankHandle(rank, Path()) for rank in range(2)]
    await ranks.kill(0.2)
    assert [agent.is_cut for agent in agents] == [False, True]
    assert not ranks.handles
