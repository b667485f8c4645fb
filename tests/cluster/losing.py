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
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.cluster.connected import ConnectedGroup
from megarl.cluster.deadlines import Deadlines
from megarl.cluster.run_ranks import RunRanks
from megarl.cluster.weight_transfer import WeightTransfer
from megarl.cluster.worker_group import PartOfRun, RankFailedError, WorkerGroup

KEY = b"k" * 32
NUM_RANKS = 4
Make = Callable[[int, PartOfRun | None], ConnectedGroup]


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
    transfer = WeightTransfer(ranks)
    lost: list[tuple[WorkerGroup, str]] = []
    ranks.on_lost = lambda group, error: lost.append((group, str(error)))
    try:
        assert await transfer.run(False, 1) == [{}] * 4
        await replicas[1].call("signal_in_reshard", "in a message", signal.SIGKILL)
        began = time.monotonic()
        assert await transfer.run(False, 2) == [{}] * 3
        assert time.monotonic() - began < 30.0
        assert [version for _, _, version in await ranks.call("exchange")] == [2] * 3
        await replicas[0].call("signal_in_reshard", "before a message", signal.SIGSTOP)
        ranks.set_deadlines(lambda: Deadlines.same(10.0))
        began = time.monotonic()
        assert await transfer.run(False, 3) == [{}] * 2
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
        told = str(caught.value)
        assert told.startswith("rank 2 of 4 on node ") and "ended or lost its connection" in told, told
    finally:
        await group.close()


SCENES = {scene.__name__: scene for scene in (lose_engines, lose_a_relayed_rank)}


def main() -> None:
    """Play a scene on the nodes of this job."""
    from megarl.cluster.srun import SrunGroup

    sys.path.insert(0, str(Path(__file__).parent))
    scene, logs = sys.argv[1:]
    asyncio.run(SCENES[scene](lambda size, part: SrunGroup(size, part=part), Path(logs)))


if __name__ == "__main__":
    main()
