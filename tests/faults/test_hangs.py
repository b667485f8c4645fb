"""A process of each kind that is stopped, not killed: it is named within its deadline plus 10 s."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from megarl.cluster.deadlines import Deadlines
from megarl.cluster.hang_report import HangReport
from megarl.cluster.worker_group import RankLostError
from megarl.platform import native_stacks
from tests.cluster.started import started

GRACE_SECONDS = 10.0


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch, distributed_tier: None) -> None:
    """Ranks import `probe` as the driver does."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "cluster"))


@pytest.mark.usefixtures("probe")
async def test_row_2_a_stopped_rank_is_named_with_the_stacks_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Debuggers take seconds; `test_native_stacks_of_this_process` runs one.
    monkeypatch.setattr(native_stacks, "_DEBUGGERS", {})
    async with started(3, log_folder=tmp_path) as group:
        await group.call("join_gloo")
        pids = await group.call("pid")
        group.deadlines = Deadlines.same(2.0)
        group.hang_report = HangReport(tmp_path, lambda: [group])
        os.kill(pids[1], signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(RankLostError) as caught:
            await group.call("collective_that_one_misses", 1, 60.0)
        seconds = time.monotonic() - began
    assert 2.0 <= seconds < 2.0 + GRACE_SECONDS
    cause = "rank 1 of 3 did not answer `collective_that_one_misses` within 2 s; ranks 0, 2 waited in a collective"
    assert (caught.value.rank, caught.value.exit_code, caught.value.cause) == (1, 76, cause)
    report = tmp_path / "hang_1.txt"
    assert str(report) in caught.value.__notes__[-1]
    text = report.read_text()
    assert "\nfirst silent rank: 1\n" in text
    kernel = text.partition("== rank 1: threads in the kernel ==")[2].partition("\n==")[0]
    assert ": T (stopped)" in kernel
    assert "== rank 1: Python ==\nwrote no stack" in text
    for rank in (0, 2):
        assert "in collective_that_one_misses" in text.partition(f"== rank {rank}: Python ==")[2].partition("\n==")[0]
    assert text.count("no native stacks: neither py-spy nor gdb is installed") == 3


def test_native_stacks_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    states = native_stacks.thread_states(os.getpid())
    assert f"thread {os.getpid()} " in states and ": " in states.partition("\n")[0]
    assert native_stacks.thread_states(2**22 + 1) == ""
    monkeypatch.setattr(native_stacks, "_DEBUGGERS", {"sh": ("sh", "-c", "echo frames of $0", "PID")})
    assert native_stacks.native_stacks(17, 60.0) == "frames of 17"
    monkeypatch.setattr(native_stacks, "_DEBUGGERS", {"sh": ("sh", "-c", "echo denied >&2; exit 3")})
    assert native_stacks.native_stacks(17, 60.0) == "no native stacks: sh ended with code 3: denied"
    monkeypatch.setattr(native_stacks, "_DEBUGGERS", {"sleep": ("sleep", "60")})
    assert native_stacks.native_stacks(17, 0.1) == "no native stacks: sleep did not end within 0.1 s"
