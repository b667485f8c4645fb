"""A separate engine that dies in the middle of a reshard: the others join a new group and have the newest weights."""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.calls.deadlines import Deadlines, Limit
from megarl.cluster.calls.group_ranks import PartOfRun
from megarl.cluster.calls.rank_errors import RankLostError
from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.cluster.reshard_calls import ReshardCalls
from megarl.cluster.run_ranks import RunRanks
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.groups.peer_errors import PeerGoneError
from megarl.platform import device
from megarl.reshard.reshard_report import ReshardReport
from megarl.reshard.staging import SharedSlots
from megarl.types import PeerLostError
from tools.local_group import LocalGroup

pytestmark = pytest.mark.distributed

LAYOUT = ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1, rollout_ranks=2)


def test_the_slots_of_a_peer_that_has_ended_or_left_are_those_of_one_that_is_gone() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    for process, number in ((ended.pid, 0), (os.getpid(), 1 << 20)):
        slots = SharedSlots.__new__(SharedSlots)
        slots._peer_ends = select.poll()
        with pytest.raises(PeerGoneError):
            slots._map_memory([(process, number)])


def recipe_of(model: Path) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "broken",
            "loop": "rl",
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"train": "unused", "max_prompt_tokens": 32},
            "cluster": {"ranks_per_node": 3},
            "trainer": {"max_tokens_per_microbatch": 64},
            "rollout": {"placement": "separate", "ranks": 2, "kv_cache_gib": 0.05, "sampling": {"max_new_tokens": 16}},
            # Smaller than the model: several buckets travel.
            "weights": {"bucket_mib": 1},
        }
    )


async def start(recipe: Recipe, logs: Path, via: str) -> RunRanks:
    settings: dict[str, Any] = {"via": via, "recipe": recipe, "parallel": LAYOUT}

    async def group(rank: int, worker: str, **further: Any) -> WorkerGroup:
        made = LocalGroup(1, PartOfRun(rank, 3, b"k" * 32), imports=device.forkable_imports("megarl.worker.colocated"))
        environment = device.rank_environment(3)
        return await made.start(worker, settings | further, log_folder=logs, environment=environment)

    trainer, *engines = await asyncio.gather(
        group(0, "dying_workers:Trainer"),
        group(1, "dying_workers:Engine", replica=0),
        group(2, "dying_workers:Engine", replica=1),
    )
    return RunRanks(trainer, engines)


@pytest.mark.parametrize(
    ("via", "moment", "number"),
    [
        pytest.param("shared memory", "reshard", signal.SIGKILL, marks=pytest.mark.long),
        ("shared memory", "reshard", signal.SIGSTOP),
        ("gloo", "reshard", signal.SIGKILL),
        ("gloo", "join", signal.SIGKILL),
        ("gloo", "join", signal.SIGSTOP),
        ("shared memory", "meeting", signal.SIGSTOP),
        ("shared memory", "own world", signal.SIGCONT),
    ],
)
async def test_the_others_have_the_newest_weights(
    tmp_path: Path,
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    via: str,
    moment: str,
    number: signal.Signals,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr("megarl.cluster.reshard_calls._MEET_SECONDS", 5.0)

    ranks = await start(recipe_of(tiny_model(num_layers=2)), tmp_path, via)
    reshard_calls = ReshardCalls(ranks)
    lost: list[tuple[WorkerGroup, Exception]] = []
    ranks.on_lost = lambda group, error: lost.append((group, error))
    dying, other = ranks.replicas
    try:
        if moment in ("reshard", "own world"):
            assert len(await reshard_calls.run(verify=True, version=1)) == 3
        fail = {"meeting": "stop_in_join", "own world": "fail_in_own_world"}.get(moment, "die_in_reshard")
        await dying.call(fail, number)
        if number == signal.SIGSTOP:
            # The calls themselves may take the limit of a collective.
            ranks.set_deadlines(lambda: Deadlines(Limit(5.0), Limit(1800.0)))
        began = time.monotonic()
        reports = await reshard_calls.run(verify=True, version=2)
        assert time.monotonic() - began < 30.0
        assert [(group, type(error)) for group, error in lost] == [(dying, RankLostError)]
        how = "was killed by SIGKILL"
        if number == signal.SIGSTOP:
            # In the meeting the others may miss it before it is found to be stopped.
            how = r"(?:did not answer `\w+` within \d+ s|did not join the process group of the others)"
        elif moment == "own world":
            how = "raised ReplicaCollectiveError during `reshard`: NCCL error"
        assert re.search(f"rank 1 of 3 {how}", str(lost[0][1])), lost
        assert ranks.replicas == [other] and len(reports) == 2 and isinstance(reports[0], ReshardReport)
        assert await other.call("version") == [2]
        # With nobody left the loss is the run's.
        await other.call("die_in_reshard", signal.SIGKILL)
        with pytest.raises(PeerLostError, match="rank 2 of 3 was killed by SIGKILL"):
            await reshard_calls.run(verify=True, version=3)
    finally:
        await ranks.close()
        await dying.close()
