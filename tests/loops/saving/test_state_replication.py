"""When the state is copied to host memory, apart from the copies themselves (`training/state/test_state_copies.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from megarl.cluster.calls.rank_errors import RankLostError
from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.loops.saving.state_replication import StateReplication
from tools.local_group import LocalGroup

pytestmark = pytest.mark.anyio


class Ranks:
    """Two ranks that record the methods called."""

    places = ()

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    async def call(self, *call: Any) -> list[Any]:
        self.calls.append(call)
        return [8, 8] if call[0] == "replicated_state.begin" else []


async def test_a_restored_state_is_copied_again_at_once(tmp_path: Path) -> None:
    """A new process holds no copy; without a second one, the loss of its partner would cost the run its progress."""
    recorded = Ranks()
    ranks = cast(WorkerGroup, recorded)
    replication = StateReplication(4, tmp_path)
    await replication.renew_copies(ranks)
    assert recorded.calls == []
    await replication.begin_copy(ranks, 4, lambda folder: (folder / "driver.json").touch(), None, None)
    await replication.complete_copy(ranks, wait=True)
    newest = replication.newest
    recorded.calls.clear()
    await replication.renew_copies(ranks)
    await replication.complete_copy(ranks, wait=True)
    assert recorded.calls == [("replicated_state.begin", 4, False), ("replicated_state.finish", True)]
    assert replication.newest == newest and newest is not None and (newest.driver / "driver.json").exists()


async def test_a_run_that_copied_only_for_a_resize_is_not_copied_again(tmp_path: Path) -> None:
    recorded = Ranks()
    ranks = cast(WorkerGroup, recorded)
    replication = StateReplication(0, tmp_path)
    await replication.begin_copy(ranks, 4, None, None, None, is_forced=True)
    await replication.complete_copy(ranks, wait=True)
    recorded.calls.clear()
    await replication.renew_copies(ranks)
    assert recorded.calls == []


@pytest.mark.distributed
async def test_a_rank_that_ends_while_its_copies_are_opened_is_named(tmp_path: Path) -> None:
    """The error is one that a run recovers from, and not that of a missing file."""
    group = await LocalGroup(1).start("tests.loops.ending_rank:EndingRank", {}, log_folder=tmp_path)
    replication = StateReplication(4, tmp_path / "copies")
    try:
        await replication.begin_copy(group, 4, None, None, None)
        with pytest.raises(RankLostError):
            await replication.complete_copy(group, wait=True)
    finally:
        await group.close()
    assert replication.newest is None
