"""Processes of separate engines after a loss: an engine that cannot start again is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.loops import rank_processes
from megarl.loops.rank_processes import RankProcesses
from megarl.types import PeerLostError

pytestmark = [pytest.mark.distributed, pytest.mark.anyio]


async def test_an_engine_that_cannot_start_again_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Recipe.model_validate(
        {
            "name": "small",
            "loop": "rl",
            "model": {"path": "absent"},
            "data": {"train": "absent.jsonl"},
            "cluster": {"recover": "restart", "ranks_per_node": 3},
            "rollout": {"placement": "separate", "ranks": 2},
        }
    )
    parallel = ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1, rollout_ranks=2)
    notices: list[str] = []
    wanted: list[list[int]] = []

    async def start_none(*_: Any, **given: Any) -> None:
        wanted.append(given["places"])
        raise PeerLostError("no node is free")

    async def replace() -> None:
        assert processes._ranks is not None
        trainers = processes._ranks.trainers
        await trainers.set_apart()
        await processes._replace(trainers, [0], tmp_path, notices.append)

    async with RankProcesses(made, parallel) as processes:
        ranks = await processes.ready(tmp_path)
        lost, other = ranks.replicas
        await lost.close()
        ranks.replicas.remove(lost)
        monkeypatch.setattr(rank_processes, "start_group", start_none)
        [kept] = other.handles
        await replace()
        assert processes._ranks is not None and processes._ranks.is_separate
        [group] = processes._ranks.replicas
        assert [*group.handles] == [kept] and group.part.first_rank == 2 and group.places == [2]
        assert notices == ["the engine of rank 1 cannot start again; the run goes on without it: no node is free"]
        processes._ranks.replicas.clear()
        await group.close()
        with pytest.raises(PeerLostError, match="no node is free"):
            await replace()
        assert wanted == [[1], [1], [2]]
