"""Processes of separate engines after a loss: an engine that cannot start again is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.calls.group_ranks import PartOfRun
from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.cluster.launchers.run_nodes import RunNodes
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.loops.ranks.rank_processes import RankProcesses
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
    fork_group = RunNodes._fork_group
    missing = [1]

    async def fork_some(nodes: RunNodes, logs: Path, part: PartOfRun, *arguments: Any, **options: Any) -> WorkerGroup:
        if part.first_rank in missing:
            raise PeerLostError("no node is free")
        return await fork_group(nodes, logs, part, *arguments, **options)

    async with RankProcesses(made, parallel) as processes:
        ranks = await processes.start(tmp_path)
        assert [group.part.first_rank for group in ranks.replicas] == [1, 2]
        monkeypatch.setattr(RunNodes, "_fork_group", fork_some)
        await ranks.close_groups()
        ranks = await processes.start(tmp_path, notify=notices.append)
        [group] = ranks.replicas
        assert group.part.first_rank == 2 and [place.local_rank for place in group.places] == [2]
        assert notices == ["an engine cannot start again; the run goes on without it: no node is free"]
        missing.append(2)
        await ranks.close_groups()
        with pytest.raises(PeerLostError, match="no node is free"):
            await processes.start(tmp_path, notify=notices.append)
