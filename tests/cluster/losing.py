"""Ranks of a launcher's groups that are lost: what the driver makes of it. A program, for within a Slurm job.

Arguments of the program: the scene, and a folder for logs.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.connected import ConnectedGroup
from megarl.cluster.deadlines import Deadlines
from megarl.cluster.hang_report import HangReport
from megarl.cluster.rank_errors import RankFailedError
from megarl.cluster.reshard_calls import ReshardCalls
from megarl.cluster.run_ranks import RunRanks
from megarl.cluster.worker_group import PartOfRun, WorkerGroup
from megarl.reshard.reshard_report import ReshardReport
from megarl.types import ConfigError
from tests.child_processes import is_alive

KEY = b"k" * 32
NUM_RANKS = 4
Make = Callable[[int, PartOfRun | None], ConnectedGroup]
MakeAny = Callable[[int, PartOfRun | None], WorkerGroup]


async def lose_engines(make: Make, logs: Path) -> None:
    """Of three engines one is killed and then another stopped, in the middle of a reshard; the third has all weights.

    Each collective waits for a minute.
    """

    async def start(first: int) -> ConnectedGroup:
        group = make(1, PartOfRun(first, NUM_RANKS, KEY))
        await group.start("cross_world_worker:CrossWorldWorker", {}, log_folder=logs)
        return group

    trainers, *replicas = [await start(first) for first in range(NUM_RANKS)]
    ranks = RunRanks(trainers, replicas)
    reshard_calls = ReshardCalls(ranks)
    lost: list[tuple[WorkerGroup, str]] = []
    ranks.on_lost = lambda group, error: lost.append((group, str(error)))
    try:
        assert await reshard_calls.run(False, 1) == [ReshardReport()] * 4
        await replicas[1].call("signal_in_reshard", "in a message", signal.SIGKILL)
        began = time.monotonic()
        assert await reshard_calls.run(False, 2) == [ReshardReport()] * 3
        assert time.monotonic() - began < 30.0
        assert [version for _, _, version in await ranks.call("exchange")] == [2] * 3
        await replicas[0].call("signal_in_reshard", "before a message", signal.SIGSTOP)
        ranks.set_deadlines(lambda: Deadlines.same(10.0))
        began = time.monotonic()
        assert await reshard_calls.run(False, 3) == [ReshardReport()] * 2
        assert time.monotonic() - began < 50.0
        assert [version for _, _, version in await ranks.call("exchange")] == [3] * 2
        killed, stopped = lost
        assert killed[0] is replicas[1] and killed[1].startswith("rank 2 of 4 on node "), killed
        assert killed[1].endswith("ended or lost its connection during `reshard`"), killed
        assert stopped[0] is replicas[0]
        assert re.fullmatch(r"rank 1 of 4 did not answer `reshard` within \d+ s", stopped[1]), stopped
    finally:
        await asyncio.gather(*(group.close() for group in (trainers, *replicas)))


async def lose_a_relayed_rank(make: Make, logs: Path) -> None:
    """Two ranks on each of two nodes, reached through the nodes' relays; one is killed in a call of all of them."""
    group = make(NUM_RANKS, None)
    group.most_direct = NUM_RANKS - 1
    await group.start("cross_world_worker:CrossWorldWorker", {}, log_folder=logs)
    try:
        connections = {handle.connection for handle in group._remote_handles}
        assert len(connections) == 2 and all(connection.is_relay for connection in connections)
        assert await group.call("place") == [(rank, str(rank % 2), NUM_RANKS) for rank in range(NUM_RANKS)]
        assert await group.scatter("echo", list("abcd")) == list(enumerate("abcd"))
        assert await group.ask([3, 0], "echo", ["x", "y"]) == [(3, "x"), (0, "y")]
        pids = await group.call("pid")
        # The others wait in a call that ends when their driver says so.
        waiting = asyncio.create_task(group.ask([0, 1], "wait_until_cancelled", ["group", "group"]))
        assert await group.ask([2], "echo", ["z"]) == [(2, "z")]
        group.cancel_group("group", "it is time")
        assert await waiting == ["it is time"] * 2
        waiting = asyncio.create_task(group.call("wait_until_cancelled", "another"))
        await asyncio.sleep(0)  # it is sent
        began = time.monotonic()
        os.kill(pids[2], signal.SIGKILL)
        with pytest.raises(RankFailedError) as caught:
            await waiting
        assert time.monotonic() - began < 30.0
        message = str(caught.value)
        assert message.startswith("rank 2 of 4 on node ") and "ended or lost its connection" in message, message
    finally:
        await group.close()


async def replace_and_resize(make: Make, logs: Path) -> None:
    """Two ranks run on each of two nodes. One is killed and one stopped, and both are replaced.

    The stopped one's threads are reported from its node. Then only one node's ranks go on, and the other node gets
    ranks again. Processes that stay are the same throughout.
    """
    group = make(NUM_RANKS, None)
    group.keeps_survivors = True
    groups = [await group.start("probe:Survivor", {}, log_folder=logs)]
    pids = await group.call("pid")

    async def follow(sources: Sequence[int | None]) -> None:
        """Let a successor follow whose rank i has the process of rank `sources[i]`, or a new one."""
        nonlocal pids
        groups.append(await groups[-1].successor(sources, logs))
        await groups[-1].construct("probe:Survivor", {})
        before, pids = pids, await groups[-1].call("pid")
        for source, pid in zip(sources, pids, strict=True):
            assert pid not in before if source is None else pid == before[source]

    async def local_ranks() -> list[str]:
        return [number for [number] in await groups[-1].call("environment", ["LOCAL_RANK"])]

    try:
        with pytest.raises(RankFailedError, match=r"^rank 1 of 4 on node .* ended or lost its connection"):
            await group.scatter("die_or_return_late", [("late", 0), ("kill", None), ("late", 0), ("late", 0)])
        await follow([0, None, 2, 3])
        stopped = pids[2]
        os.kill(stopped, signal.SIGSTOP)
        groups[-1].deadlines = Deadlines.same(2.0)
        groups[-1].hang_report = HangReport(logs, lambda: [groups[-1]], native_seconds=60.0, most_native=1)
        with pytest.raises(RankFailedError, match=r"^rank 2 of 4 did not answer"):
            await groups[-1].call("pid")
        found = (logs / "hang_1.txt").read_text().partition("== rank 2: native ==")[2].partition("\n==")[0]
        assert f"thread {stopped} " in found and ": T (stopped)" in found, found
        await follow([0, 1, None, 3])
        assert not is_alive(stopped)
        assert groups[-1].topology == group.topology and await local_ranks() == ["0", "1"] * 2
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(RankFailedError, match=r"^rank 0 of 4"):
            await groups[-1].call("pid")
        await follow([2, 3])
        with pytest.raises(ConfigError, match=r"^cluster.nodes: .* ask for fewer ranks"):
            await groups[-1].reserve(2 * NUM_RANKS)
        await groups[-1].reserve(NUM_RANKS)
        await groups[-1].set_apart()
        assert groups[-1].arranged(NUM_RANKS) == [0, 1, None, None]
        await follow([0, 1, None, None])
        assert groups[-1].topology == [*group.topology[2:], *group.topology[:2]]
        assert await local_ranks() == ["0", "1"] * 2
        assert await groups[-1].call("sum_of_ranks") == [6] * NUM_RANKS
    finally:
        for one in groups:
            await one.close()


async def resize_next_to_engines(make: MakeAny, logs: Path) -> None:
    """Two trainer ranks and two engines of one rank. The trainer shrinks; then it takes the place of an engine too.

    Processes that stay are the same, with the same places, although their ranks in the run change.
    """

    async def start(size: int, first: int) -> WorkerGroup:
        group = make(size, PartOfRun(first, NUM_RANKS, KEY))
        group.keeps_survivors = first == 0
        return await group.start("probe:Survivor", {}, log_folder=logs)

    ranks = RunRanks(await start(2, 0), [await start(1, first) for first in (2, 3)])

    async def resize(sources: Sequence[int | None]) -> list[int]:
        """Give the trainers' group a successor, renumber the engines, and return the processes of all ranks."""
        nonlocal ranks
        for group in ranks.groups:
            await group.set_apart()
        num_ranks = len(sources) + len(ranks.replicas)
        part = PartOfRun(0, num_ranks, KEY)
        trainers = await ranks.trainers.successor(sources, logs, part)
        ranks = RunRanks(trainers, ranks.replicas)
        for number, group in enumerate(list(ranks.replicas)):
            ranks.replace_replica(
                group, await group.successor([0], logs, replace(part, first_rank=len(sources) + number))
            )
        for group in ranks.groups:
            await group.construct("probe:Survivor", {})
        assert [group.part.num_ranks for group in ranks.groups] == [num_ranks] * len(ranks.groups)
        return await ranks.call("pid")

    try:
        _, second, *engines = await ranks.call("pid")
        assert [group.places for group in ranks.groups] == [[0, 1], [2], [3]]
        assert await resize([1]) == [second, *engines]
        assert [group.places for group in ranks.groups] == [[1], [2], [3]]
        assert [handle.rank for group in ranks.groups for handle in group.handles] == [0, 1, 2]
        if isinstance(ranks.trainers, ConnectedGroup):
            await ranks.reserve(2, [1, 1])
            await ranks.reserve(3, [1])
            for num_trainers, sizes in ((3, [1, 1]), (3, [2]), (1, [1] * 4)):
                with pytest.raises(ConfigError, match=r"^cluster.nodes: .* ask for fewer ranks"):
                    await ranks.reserve(num_trainers, sizes)
        ended = ranks.replicas.pop()
        await ended.close()
        first, *new, engine = await resize([0, None, None])
        assert (first, engine) == (second, engines[0]), (first, engine, second, engines)
        assert not {*new} & {second, *engines}, (new, second, engines)
        assert [group.places for group in ranks.groups] == [[1, 0, 3], [2]]
        logs_of_ranks = [handle.log for group in ranks.groups for handle in group.handles]
        assert len(set(logs_of_ranks)) == NUM_RANKS
    finally:
        await ranks.close()


SCENES = {
    scene.__name__: scene for scene in (lose_engines, lose_a_relayed_rank, replace_and_resize, resize_next_to_engines)
}


def scenes(*short: str, without: Sequence[str] = ()) -> list[Any]:
    """Return the scenes as parameters of a test. All but the `short` ones are marked long."""
    chosen = [scene for scene in SCENES if scene not in without]
    return [scene if scene in short else pytest.param(scene, marks=pytest.mark.long) for scene in chosen]


def main() -> None:
    """Play a scene on the nodes of this job."""
    from megarl.cluster.srun import SrunGroup

    sys.path.insert(0, str(Path(__file__).parent))
    scene, logs = sys.argv[1:]
    asyncio.run(SCENES[scene](lambda size, part: SrunGroup(size, part=part), Path(logs)))


if __name__ == "__main__":
    main()
