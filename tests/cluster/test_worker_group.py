"""A group of ranks before its ranks start, and how a rank judges an error."""

from __future__ import annotations

import pytest

from megarl.cluster.calls.group_ranks import PartOfRun
from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.cluster.ranks.rank import _is_lost


def test_a_group_is_the_whole_run_or_the_part_that_it_gets() -> None:
    whole, part = WorkerGroup(3), PartOfRun(4, 9, bytes(32))
    assert (whole.part.first_rank, whole.part.num_ranks) == (0, 3)
    assert WorkerGroup(3, part).part is part
    # No call has run.
    assert whole.seconds_in_calls == 0.0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        pytest.param(MemoryError(), True, id="Python's memory"),
        pytest.param(RuntimeError("std::bad_alloc"), True, id="a library's memory"),
        pytest.param(TimeoutError(), True, id="time limit"),
        pytest.param(ValueError("a shape is wrong"), False, id="the program's own fault"),
    ],
)
def test_a_restart_may_help_where_memory_or_time_ran_out(error: Exception, expected: bool) -> None:
    assert _is_lost(error) == expected
