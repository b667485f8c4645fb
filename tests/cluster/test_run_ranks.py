"""Trainers and engine replicas as groups of one run, on real processes: numbers, transfers, a replaced replica."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from megarl.cluster.calls.deadlines import Deadlines, Limit
from megarl.cluster.calls.group_ranks import PartOfRun
from megarl.cluster.calls.rank_errors import RankFailedError, RankLostError
from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.cluster.reshard_calls import ReshardCalls
from megarl.cluster.reshard_states import TransitionError
from megarl.cluster.run_ranks import RunRanks
from megarl.reshard.reshard_report import ReshardReport
from megarl.types import PeerLostError
from tests.cluster.started import shared_imports
from tools.local_group import LocalGroup

KEY = b"k" * 32
pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("worker_module")]


async def group(size: int, first: int, logs: Path, num_ranks: int = 4, key: bytes = KEY) -> LocalGroup:
    return await LocalGroup(size, PartOfRun(first, num_ranks, key), imports=shared_imports()).start(
        "cross_world_worker:CrossWorldWorker", {}, log_folder=logs
    )


@asynccontextmanager
async def started(logs: Path) -> AsyncIterator[tuple[RunRanks, ReshardCalls]]:
    """Two trainers and two replicas of one rank."""
    trainers, *replicas = await asyncio.gather(group(2, 0, logs), group(1, 2, logs), group(1, 3, logs))
    ranks = RunRanks(trainers, replicas)
    try:
        yield ranks, ReshardCalls(ranks)
    finally:
        await ranks.close()


async def test_ranks_are_numbered_through(tmp_path: Path) -> None:
    async with started(tmp_path) as (ranks, _):
        assert ranks.world_size == 4 and len(ranks.topology) == 4 and ranks.is_separate
        # Worlds of their own, on one node.
        assert await ranks.call("place") == [(0, "0", 2), (1, "1", 2), (0, "2", 1), (0, "3", 1)]
        assert await ranks.ask([1, 0], "echo", ["a", "b"]) == [(1, "a"), (0, "b")]
        assert await ranks.ask([3], "echo", ["c"]) == [(0, "c")]
        assert await ranks.call_engines("place") == [(0, "2", 1), (0, "3", 1)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rank_{rank:04d}.log" for rank in range(4)]


async def test_a_hang_report_pauses_only_ranks_of_the_group_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The agents find this program before any real debugger.
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "py-spy").write_text("#!/bin/sh\necho in main of process $4\n")
    (programs / "py-spy").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    async with started(tmp_path) as (ranks, _):
        notices: list[str] = []
        ranks.report_hangs(tmp_path, notices.append)
        pids = await ranks.trainers.call("pid")
        await ranks.trainers.diagnosis.end_faulty([1], "fell silent")
        # The other groups go on.
        assert await ranks.ask([2], "echo", ["c"]) == [(0, "c")]
    text = (tmp_path / "hang_1.txt").read_text()
    assert re.findall("in main of process ([0-9]+)", text) == [str(pids[1]), str(pids[0])]
    assert [f"== rank {rank}: Python ==" in text for rank in range(4)] == [True] * 4
    assert len(notices) == 1 and notices[0].startswith("rank 1 of 4 fell silent")


async def test_a_rank_that_dies_while_the_driver_waits_is_noticed(tmp_path: Path) -> None:
    trainers = await group(2, 0, tmp_path, num_ranks=2)
    ranks = RunRanks(trainers)
    try:
        assert await ranks.watching(asyncio.sleep(0.01, "scored")) == "scored"
        pids = await trainers.call("pid")
        waiting = asyncio.create_task(ranks.watching(asyncio.sleep(60, "scored")))
        await asyncio.sleep(0.1)
        os.kill(pids[1], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(PeerLostError, match="rank 1"):
            await asyncio.wait_for(waiting, 30)
        assert time.monotonic() - began < 10
    finally:
        await ranks.close()


async def test_an_engine_rank_that_dies_while_the_driver_waits_is_noticed(tmp_path: Path) -> None:
    """The run goes on without the first replica; the loss of the last one ends the wait."""
    async with started(tmp_path) as (ranks, _):
        lost: list[WorkerGroup] = []
        ranks.on_lost = lambda group, error: lost.append(group)
        first, last = ranks.replicas
        pids = await ranks.call("pid")
        waiting = asyncio.create_task(ranks.watching(asyncio.sleep(60, "scored")))
        os.kill(pids[2], signal.SIGKILL)
        async with asyncio.timeout(30):
            while not lost:
                await asyncio.sleep(0.05)
        assert lost == [first] and ranks.replicas == [last] and not waiting.done()
        os.kill(pids[3], signal.SIGKILL)
        with pytest.raises(RankLostError, match=r"rank 3 of 4 was killed by SIGKILL .* during `sampling and scoring`"):
            await asyncio.wait_for(waiting, 30)
        await first.close()


async def test_what_one_replica_s_ranks_signed_is_not_its_successor_s(tmp_path: Path) -> None:
    """One key for the run's messages, another name of the world in each start's: none can be repeated in another."""

    worlds = []
    for _ in range(2):
        replica = await group(1, 2, tmp_path)
        worlds += await replica.call("world")
        await replica.close()
    (first, key), (second, other_key) = worlds
    assert first and second and first != second and key == other_key


async def test_a_new_cross_world_group_includes_a_restarted_replica(tmp_path: Path) -> None:
    async with started(tmp_path) as (ranks, reshard_calls):
        for version in (1, 2):
            await reshard_calls.run(False, version)
            answers = await ranks.call("exchange")
            pids = [pid for _, pid in answers[0][0]]
            assert len(set(pids)) == 4
            for rank, (told, received, theirs) in enumerate(answers):
                assert told == list(enumerate(pids)) and theirs == version
                assert received == [100.0 * other + rank for other in range(4)]
        lost = []
        ranks.on_lost = lambda group, error: lost.append(group)
        dead = ranks.replicas[0]
        os.kill(pids[2], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RankLostError, match="rank 2 of 4 was killed by SIGKILL"):
            await ranks.ask([2], "echo", ["x"])
        assert time.monotonic() - began < 2.0
        await dead.close()
        # The others are none the worse for it.
        assert lost == [dead] and await ranks.ask([3], "echo", ["c"]) == [(0, "c")]
        with pytest.raises(PeerLostError):
            await ranks.ask([2], "echo", ["x"])
        await reshard_calls.run(False, 3)
        assert [version for _, _, version in await ranks.call("exchange")] == [3] * 3
        reshard_calls.add([await group(1, 2, tmp_path)])
        await reshard_calls.run(False, 3)
        [(told, _, version), *_] = await ranks.call("exchange")
        assert [pid for _, pid in told][2] not in pids and version == 3


@pytest.mark.parametrize("how", ["killed before", "stopped"])
async def test_a_replica_that_does_not_join_is_lost_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("megarl.cluster.reshard_calls._MEET_SECONDS", 1.0)

    async with started(tmp_path) as (ranks, reshard_calls):
        lost: list[tuple[WorkerGroup, Exception]] = []
        ranks.on_lost = lambda group, error: lost.append((group, error))
        absent = ranks.replicas[1]
        if how == "stopped":
            await absent.call("stop_in_join")
        else:
            os.kill((await absent.call("pid"))[0], signal.SIGKILL)
        began = time.monotonic()
        assert await reshard_calls.run(False, 1) == [ReshardReport()] * 3
        assert time.monotonic() - began < 15.0
        told = "did not join the process group of the others" if how == "stopped" else "was killed by SIGKILL"
        [(group, error)] = lost
        assert group is absent and isinstance(error, RankLostError) and f"rank 3 of 4 {told}" in str(error)
        assert [version for _, _, version in await ranks.call("exchange")] == [1] * 3
        await absent.close()


@pytest.mark.parametrize(
    ("moments", "told"),
    [
        # gloo notifies nobody who is in the middle of a message when the connection breaks.
        (("in a message", ""), ["rank 2 of 4 was killed by SIGKILL (out of memory?) during `reshard`"]),
        (
            ("in a message", "before a message"),
            [
                "rank 2 of 4 was killed by SIGKILL (out of memory?) during `reshard`",
                "rank 3 of 4 did not leave `reshard` after its process group was aborted",
            ],
        ),
        (
            ("opening", "opening"),
            [
                "rank 2 of 4 was killed by SIGKILL (out of memory?) during `join_and_reshard`",
                "rank 3 of 4 did not leave `join_and_reshard` after its process group was aborted",
            ],
        ),
    ],
)
async def test_nobody_waits_in_a_cross_world_group_for_a_lost_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moments: tuple[str, str], told: list[str]
) -> None:
    """One replica is killed, the other one is stopped; a collective of their group has a minute."""
    monkeypatch.setattr("megarl.cluster.reshard_calls._LEAVE_SECONDS", 0.5)

    async with started(tmp_path) as (ranks, reshard_calls):
        lost: list[tuple[WorkerGroup, str]] = []
        ranks.on_lost = lambda group, error: lost.append((group, str(error)))
        replicas = list(ranks.replicas)
        if "opening" not in moments:
            assert await reshard_calls.run(False, 1) == [ReshardReport()] * 4
        for replica, moment, number in zip(replicas, moments, (signal.SIGKILL, signal.SIGSTOP), strict=True):
            if moment == "opening":
                await replica.call("signal_when_all_have_come", number)
            elif moment:
                await replica.call("signal_in_reshard", moment, number)
        began = time.monotonic()
        if len(told) == 1:
            assert await reshard_calls.run(False, 2) == [ReshardReport()] * 3
            assert [version for _, _, version in await ranks.call("exchange")] == [2] * 3
        else:
            with pytest.raises(PeerLostError) as caught:
                await reshard_calls.run(False, 2)
            lost.append((replicas[1], str(caught.value)))  # none is left, so it is the run's end
        assert time.monotonic() - began < 30.0
        assert [group for group, _ in lost] == replicas[: len(told)]
        for (_, found), expected in zip(lost, told, strict=True):
            assert found.startswith(expected)
        for replica in replicas:
            await replica.close()


async def test_only_the_engine_that_hangs_is_lost_though_all_groups_are_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a debugger holds it: the process is not stopped, so only the deadline finds it."""
    monkeypatch.setattr("megarl.cluster.reshard_calls._SLACK_SECONDS", 1.0)
    monkeypatch.setattr("megarl.cluster.reshard_calls._LOOK_SECONDS", 0.2)
    async with started(tmp_path) as (ranks, reshard_calls):
        lost: list[tuple[WorkerGroup, str]] = []
        ranks.on_lost = lambda group, error: lost.append((group, str(error)))
        hanging, other = ranks.replicas
        assert await reshard_calls.run(False, 1) == [ReshardReport()] * 4
        await hanging.call("signal_in_reshard", "for ever", 0)
        # The attempt after the loss has the usual time.
        ranks.set_deadlines(lambda: Deadlines(Limit(60.0), Limit(60.0), {"reshard": Limit(2.0, "cluster.x_seconds")}))
        assert await reshard_calls.run(False, 2) == [ReshardReport()] * 3
        assert [group for group, _ in lost] == [hanging]
        named = "rank 2 of 4 did not answer `reshard` within 4 s; if it needs longer, raise cluster.x_seconds"
        assert lost[0][1].startswith(named)
        assert not ranks.trainers.end.has_begun and ranks.replicas == [other]
        assert [version for _, _, version in await ranks.call("exchange")] == [2] * 3
        await hanging.close()


async def test_a_replica_that_leaves_every_cross_world_group_is_lost_before_the_last(tmp_path: Path) -> None:
    async with started(tmp_path) as (ranks, reshard_calls):
        lost: list[tuple[WorkerGroup, Exception]] = []
        ranks.on_lost = lambda group, error: lost.append((group, error))
        faulty, other = ranks.replicas
        await faulty.call("leave_every_group")
        assert await reshard_calls.run(False, 1) == [ReshardReport()] * 3
        assert [group for group, _ in lost] == [faulty]
        assert "rank 2 of 4 left the reshard first, at attempt 2 of 3" in str(lost[0][1])
        await faulty.close()
        # Without another the run ends, and who left is named.
        await other.call("leave_every_group")
        ranks.on_removed("the next reshard needs a new group")
        with pytest.raises(PeerLostError, match="3 consecutive reshards to the engines were aborted"):
            await reshard_calls.run(False, 2)


async def test_a_report_that_does_not_fit_the_transfer_fails_it(tmp_path: Path) -> None:
    trainers, replica = await asyncio.gather(group(1, 0, tmp_path, 2), group(1, 1, tmp_path, 2))
    ranks = RunRanks(trainers, [replica])
    try:
        reshard_calls = ReshardCalls(ranks)
        assert await reshard_calls.run(False, 1) == [ReshardReport()] * 2
        await replica.call("misreport")
        with pytest.raises(TransitionError, match="SENDING cannot handle PEER_MISSING"):
            await reshard_calls.run(False, 2)
        assert not reshard_calls.is_connected
    finally:
        await ranks.close()


async def test_the_first_cause_is_told_not_the_collective_that_others_lost(tmp_path: Path) -> None:
    async with started(tmp_path) as (ranks, reshard_calls):
        await reshard_calls.run(False, 1)
        with pytest.raises(RankFailedError, match="rank 3 of 4 raised ValueError during `fail`: the first cause"):
            await ranks.call("fail", 3)


async def test_a_group_with_another_key_cannot_join_a_cross_world_group(tmp_path: Path) -> None:
    trainers, stranger = await asyncio.gather(group(1, 0, tmp_path, 2), group(1, 1, tmp_path, 2, key=b"s" * 32))
    ranks = RunRanks(trainers, [stranger])
    try:
        joining = asyncio.ensure_future(ReshardCalls(ranks).run(False, 1))
        # Each waits at names of the store that the other does not know.
        done, _ = await asyncio.wait([joining], timeout=3.0)
        assert not done
        joining.cancel()
        await asyncio.wait([joining])
    finally:
        await ranks.close()
