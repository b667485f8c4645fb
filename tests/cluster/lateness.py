"""A rank of several that is late, and what is told of it."""

from __future__ import annotations

import pytest

from megarl.cluster.calls.deadlines import Deadlines
from megarl.cluster.calls.rank_errors import RankFailedError
from megarl.cluster.calls.worker_group import WorkerGroup


async def see_who_is_late(group: WorkerGroup, seconds: float) -> None:
    """Rank 1 of a group of Probes sleeps beyond the limit while rank 2 answers; the error has the stacks of all."""
    group.deadlines = Deadlines.for_all_methods(seconds)
    with pytest.raises(RankFailedError) as caught:
        await group.ask([1, 2], "sleep_on", [1, 1], 60)
    size = group.world_size
    assert caught.value.cause == f"rank 1 of {size} did not answer `sleep_on` within {seconds:g} s"
    stacks = caught.value.__notes__[0]
    others = ", ".join(str(rank) for rank in range(size) if rank != 1)
    assert "in sleep_on" in stacks.partition("\nrank 1\n")[2].partition("\nrank")[0]
    assert "in serve" in stacks.partition(f"\nranks {others}\n")[2].partition("\nrank")[0]
