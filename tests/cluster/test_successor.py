"""A group that follows one with a lost rank: the processes of the others continue, with other numbers if need be."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path

import pytest

from megarl.cluster import worker_group
from megarl.cluster.local import LocalGroup
from megarl.types import PeerLostError
from tests.child_processes import is_alive
from tests.cluster.losing import resize_next_to_engines
from tests.cluster.started import shared_imports

pytestmark = pytest.mark.usefixtures("worker_module")
PROBE = "probe:Survivor"


@contextlib.asynccontextmanager
async def kept(world_size):
    """Yield a group that keeps survivors, and a list of its successors. All are closed."""
    with tempfile.TemporaryDirectory() as folder:
        group = await LocalGroup(world_size, imports=shared_imports()).start(PROBE, {}, log_folder=Path(folder))
        group.keeps_survivors = True
        groups = [group]
        try:
            yield group, groups, Path(folder)
        finally:
            for one in groups:
                await one.close()


async def follow(groups, sources, folder):
    groups.append(await groups[-1].successor(sources, folder))
    return groups[-1]


@pytest.mark.usefixtures("nothing_left")
def test_only_the_lost_process_is_replaced(tmp_path, own_fork_servers):
    """Survivors keep processes and what their workers leave. Then fewer ranks, and then more than at first."""

    async def scenario():
        async with kept(3) as (group, groups, logs):
            await group.call("join_gloo")
            pids = await group.call("pid")
            await group.scatter("remember", ["a", "b", "c"])
            with pytest.raises(PeerLostError, match=r"^rank 1 of 3 was killed by SIGKILL"):
                # Rank 2 answers this call only after the next world has been asked for.
                await group.scatter("die_or_return_late", [("wait", tmp_path / "go"), ("kill", None), ("late", 0.7)])
            assert [handle.rank for handle in group.survivors] == [0, 2]
            (tmp_path / "go").touch()

            second = await follow(groups, range(3), logs)
            steps, damages = await second.inherited_steps()
            assert steps == [{1: "a"}, {}, {1: "c"}]
            assert [damage.partition(":")[2] for damage in damages] == [
                f" {word} was damaged; this copy is dropped" for word in "ac"
            ]
            assert [damage.split()[:2] for damage in damages] == [["rank", "0"], ["rank", "2"]]
            await second.construct(PROBE, {})
            after = await second.call("pid")
            assert [after[0], after[2]] == [pids[0], pids[2]] and after[1] not in pids
            assert await second.call("product", 10) == [(0, 10), (1, 20), (2, 30)], "an answer to an earlier call"
            assert await second.call("recall") == ["a", None, "c"]
            assert await second.call("sum_of_ranks") == [3, 3, 3]
            assert await second.call("environment", ["RANK", "WORLD_SIZE", "LOCAL_RANK"]) == [
                [str(rank), "3", str(rank)] for rank in range(3)
            ]
            with pytest.raises(PeerLostError):
                await group.call("pid")

            with pytest.raises(PeerLostError, match=r"^rank 0 of 3"):
                await second.scatter("die_or_return_late", [("kill", None), ("late", 0), ("late", 0)])
            third = await follow(groups, [1, 2], logs)
            await third.construct(PROBE, {})
            assert await third.call("pid") == after[1:], "renumbered"
            assert third.part.num_ranks == 2 and await third.call("sum_of_ranks") == [1, 1]
            assert await third.call("environment", ["RANK", "WORLD_SIZE", "LOCAL_RANK"]) == [
                ["0", "2", "1"],
                ["1", "2", "2"],
            ]

            await third.set_apart()
            fourth = await follow(groups, [0, 1, None, None], logs)
            await fourth.construct(PROBE, {})
            last = await fourth.call("pid")
            assert last[:2] == after[1:] and len({*last, *pids}) == 6
            assert await fourth.call("sum_of_ranks") == [6] * 4
            own = [name for [name] in await fourth.call("environment", ["LOCAL_RANK"])]
            assert own == ["1", "2", "0", "3"], "a GPU twice"
            assert len({handle.log for handle in fourth._handles}) == 4, "two processes write to one log"
            return [*pids, *after, *last]

    assert not [pid for pid in asyncio.run(scenario()) if is_alive(pid)]


@pytest.mark.usefixtures("nothing_left")
async def test_a_group_grows_and_shrinks_next_to_others(tmp_path: Path) -> None:
    await resize_next_to_engines(lambda size, part: LocalGroup(size, part, imports=shared_imports()), tmp_path)


def test_a_survivor_that_does_not_leave_is_replaced(tmp_path, monkeypatch, own_fork_servers):
    monkeypatch.setattr(worker_group, "_ABANDON_SECONDS", 4.0)

    async def scenario():
        async with kept(3) as (group, groups, logs):
            pids = await group.call("pid")
            await group.scatter("remember", ["a", "b", "c"])
            with pytest.raises(PeerLostError, match="rank 1"):
                await group.scatter("die_or_return_late", [("late", 600), ("kill", None), ("late", 0)])
            second = await follow(groups, range(3), logs)
            assert (await second.inherited_steps())[0] == [{}, {}, {1: "c"}]
            await second.construct(PROBE, {})
            after = await second.call("pid")
            assert after[2] == pids[2] and not {*after[:2]} & {*pids} and not is_alive(pids[0])
            return after

    assert not [pid for pid in asyncio.run(scenario()) if is_alive(pid)]


@pytest.mark.usefixtures("nothing_left")
def test_nothing_is_left_of_a_group_without_a_successor(tmp_path, monkeypatch, own_fork_servers):
    """Closed with its survivors; cancelled while they leave; and when a process of the next group does not start."""

    async def lost(group):
        pids = await group.call("pid")
        with pytest.raises(PeerLostError, match="rank 1"):
            await group.scatter("die_or_return_late", [("late", 0), ("kill", None), ("late", 0)])
        assert is_alive(pids[0]) and is_alive(pids[2])
        return pids

    async def closed():
        async with kept(3) as (group, _, _):
            return await lost(group)

    async def cancelled():
        async with kept(3) as (group, groups, logs):
            pids = await group.call("pid")
            with pytest.raises(PeerLostError, match="rank 1"):
                await group.scatter("die_or_return_late", [("late", 600), ("kill", None), ("late", 0)])
            asked = asyncio.Event()
            ask = group._ask
            group._ask = lambda messages: (asked.set(), ask(messages))[1]
            following = asyncio.create_task(follow(groups, range(3), logs))
            await asked.wait()
            following.cancel()
            with pytest.raises(asyncio.CancelledError):
                await following
            return pids

    async def failed():
        async with kept(3) as (group, groups, logs):
            pids = await lost(group)

            def refuse(*_):
                raise OSError("no more files")

            with monkeypatch.context() as patch:
                patch.setattr("megarl.cluster.local.provide_open_files", refuse)
                with pytest.raises(OSError, match="no more files"):
                    await follow(groups, range(3), logs)
            return pids

    for scenario in (closed, cancelled, failed):
        assert not [pid for pid in asyncio.run(scenario()) if is_alive(pid)], scenario.__name__


def test_two_ranks_with_faults_of_their_own_are_both_lost():
    """A process with a broken GPU must not continue, even if another rank was lost first."""

    async def scenario():
        async with kept(3) as (group, _, _):
            with pytest.raises(PeerLostError, match="rank"):
                await group.scatter("die_or_return_late", [("device", None), ("device", None), ("late", 0)])
            return [handle.rank for handle in group.survivors]

    assert asyncio.run(scenario()) == [2]
