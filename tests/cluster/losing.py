"""Ranks of a launcher's nodes that are lost: what the driver makes of it. A program, for within a Slurm job.

Arguments of the program: the scene, and a folder for logs.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.agents.nodes import Nodes
from megarl.cluster.calls.deadlines import Deadlines
from megarl.cluster.calls.diagnosis import HangReport
from megarl.cluster.calls.group_ranks import PartOfRun
from megarl.cluster.calls.rank_errors import RankFailedError
from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.cluster.reshard_calls import ReshardCalls
from megarl.cluster.run_ranks import RunRanks
from megarl.reshard.reshard_report import ReshardReport
from megarl.types import ConfigError
from tests.child_processes import is_alive

KEY = b"k" * 32
NUM_RANKS = 4
START_SECONDS = 300.0


async def lose_engines(nodes: Nodes, logs: Path) -> None:
    """Of three engines one is killed and then another stopped, in the middle of a reshard; the third has all weights.

    Each collective waits for a minute.
    """
    places = nodes.choose_places(NUM_RANKS, (), on_one_node=False)

    async def start(first: int) -> WorkerGroup:
        group = WorkerGroup(1, PartOfRun(first, NUM_RANKS, KEY), places=[places[first]])
        return await group.start("cross_world_worker:CrossWorldWorker", {}, log_folder=logs)

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
        ranks.set_deadlines(lambda: Deadlines.for_all_methods(10.0))
        began = time.monotonic()
        assert await reshard_calls.run(False, 3) == [ReshardReport()] * 2
        assert time.monotonic() - began < 50.0
        assert [version for _, _, version in await ranks.call("exchange")] == [3] * 2
        killed, stopped = lost
        assert killed[0] is replicas[1]
        assert re.fullmatch(r"rank 2 of 4 on node .* was killed by SIGKILL .*during `reshard`", killed[1]), killed
        assert stopped[0] is replicas[0]
        assert re.fullmatch(r"rank 1 of 4 did not answer `reshard` within \d+ s", stopped[1]), stopped
    finally:
        await asyncio.gather(*(group.close() for group in (trainers, *replicas)))


async def lose_a_rank(nodes: Nodes, logs: Path) -> None:
    """Two ranks on each of two nodes; one is killed in a call of all of them."""
    places = nodes.choose_places(NUM_RANKS, (), on_one_node=False)
    group = WorkerGroup(NUM_RANKS, places=places)
    await group.start("cross_world_worker:CrossWorldWorker", {}, log_folder=logs)
    try:
        assert len({place.agent for place in places}) == 2
        assert await group.call("place") == [(rank, str(rank % 2), NUM_RANKS) for rank in range(NUM_RANKS)]
        assert await group.scatter("echo", list("abcd")) == list(enumerate("abcd"))
        assert await group.ask([3, 0], "echo", ["x", "y"]) == [(3, "x"), (0, "y")]
        pids = await group.call("pid")
        # The others wait in a call that ends when their driver says so.
        waiting = asyncio.create_task(group.ask([0, 1], "wait_until_cancelled", ["group", "group"]))
        assert await group.ask([2], "echo", ["z"]) == [(2, "z")]
        group.ranks.cancel_process_group("group", "it is time")
        assert await waiting == ["it is time"] * 2
        waiting = asyncio.create_task(group.call("wait_until_cancelled", "another"))
        await asyncio.sleep(0)  # it is sent
        began = time.monotonic()
        os.kill(pids[2], signal.SIGKILL)
        with pytest.raises(RankFailedError, match=r"^rank 2 of 4 on node .* was killed by SIGKILL"):
            await waiting
        assert time.monotonic() - began < 30.0
        assert group.end.lost == [handle for handle in group.end.lost if handle.rank == 2]
    finally:
        await group.close()


async def start_again(nodes: Nodes, logs: Path) -> None:
    """Two ranks run on each of two nodes. One is killed; in the next group one is stopped; the third works.

    The stopped one's threads are reported from its node. Nothing but the agents outlives a group.
    """
    ended: list[int] = []

    async def start() -> tuple[WorkerGroup, list[int]]:
        places = nodes.choose_places(NUM_RANKS, (), on_one_node=False)
        group = WorkerGroup(NUM_RANKS, places=places)
        await group.start("probe:Probe", {}, log_folder=logs)
        pids = await group.call("pid")
        assert not {*pids} & {*ended} and not any(map(is_alive, ended))
        ended.extend(pids)
        assert [number for [number] in await group.call("environment", ["LOCAL_RANK"])] == ["0", "1"] * 2
        return group, pids

    group, pids = await start()
    waiting = asyncio.create_task(group.call("sleep", 600))
    await asyncio.sleep(0)  # it is sent
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RankFailedError, match=r"^rank 1 of 4 on node .* was killed by SIGKILL"):
        await waiting
    group, pids = await start()
    os.kill(pids[2], signal.SIGSTOP)
    group.deadlines = Deadlines.for_all_methods(2.0)
    group.report_hangs(HangReport(logs, lambda: [group.diagnosis], most_native=0))
    with pytest.raises(RankFailedError, match=r"^rank 2 of 4 did not answer"):
        await group.call("pid")
    text = (logs / "hang_1.txt").read_text().partition("== rank 2: threads in the kernel ==")[2].partition("\n==")[0]
    assert f"thread {pids[2]} " in text and ": T (stopped)" in text, text
    group, _ = await start()
    await group.call("join_gloo")
    await group.close()
    with pytest.raises(ConfigError, match=r"^cluster.nodes: .* ask for fewer ranks"):
        await nodes.replenish(len(nodes.agents) + 3, START_SECONDS)


SCENES = {scene.__name__: scene for scene in (lose_engines, lose_a_rank, start_again)}


def scenes(*short: str, without: Sequence[str] = ()) -> list[Any]:
    """Return the scenes as parameters of a test. All but the `short` ones are marked long."""
    chosen = [scene for scene in SCENES if scene not in without]
    return [scene if scene in short else pytest.param(scene, marks=pytest.mark.long) for scene in chosen]


async def play(scene: str, nodes: Nodes, logs: Path) -> None:
    """Start the agents of nodes, play a scene on them, and end them."""
    await nodes.start(logs, START_SECONDS)
    try:
        await SCENES[scene](nodes, logs)
    finally:
        await nodes.close()


def main() -> None:
    """Play a scene on the nodes of this job."""
    from megarl.cluster.agents.topology import NodeKind
    from megarl.cluster.launchers.srun import SrunNodes

    sys.path.insert(0, str(Path(__file__).parent))
    scene, logs = sys.argv[1:]
    num_nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
    asyncio.run(play(scene, SrunNodes(NodeKind(0, num_nodes, NUM_RANKS // num_nodes), {}, ()), Path(logs)))


if __name__ == "__main__":
    main()
