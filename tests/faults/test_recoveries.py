"""Losses and a signal while a run recovers from a loss: it goes on from the copies of its state in host memory."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.faults import VARIABLE
from tests.child_processes import driver_process, rank_processes
from tests.faults.broken_runs import PATIENCE_SECONDS, BrokenRuns
from tests.held_run import steps_of

pytestmark = [pytest.mark.end_to_end, pytest.mark.fault_runs]

RECOVERED = (
    # Without a checkpoint, a run that lost its copies would begin again.
    "checkpoint.every_steps=0", "checkpoint.replicate=1", "cluster.recover=restart", "monitor.port=0",
)  # fmt: skip


def wait_for(driver: subprocess.Popen[str], is_reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_reached():
        assert driver.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def await_new_ranks(driver: subprocess.Popen[str], earlier: dict[int, int]) -> dict[int, int]:
    """Wait until both ranks run in processes that are none of the earlier ones. Returns the process of each rank."""
    ranks: dict[int, int] = {}

    def have_started() -> bool:
        ranks.clear()
        ranks.update(rank_processes(driver.pid))
        return len(ranks) == 2 and not {*ranks.values()} & {*earlier.values()}

    wait_for(driver, have_started)
    return dict(ranks)


def attempts(run: Path) -> list[Path]:
    """Return the log folders of a run's attempts, the oldest first."""
    return sorted(path for path in (run / "logs").iterdir() if not path.is_symlink())


def await_restore(driver: subprocess.Popen[str], run: Path) -> None:
    """Wait until rank 1 of the newest attempt restores its state."""
    log = attempts(run)[-1] / "rank_0001.log"
    wait_for(driver, lambda: log.exists() and f"{VARIABLE}: restore" in log.read_text())


def test_rows_52_to_55_losses_and_a_signal_during_a_recovery(broken_runs: BrokenRuns) -> None:
    """The rank that survived the first loss is killed as soon as it starts again, then one in the midst of restoring.

    SIGTERM comes in the midst of the third recovery.
    """
    run = broken_runs.run

    def kill_thrice_and_stop(driver: subprocess.Popen[str]) -> None:
        # The copy of a step may still be on its way while the next step trains.
        wait_for(driver, lambda: len(steps_of(run)) >= 2)
        first = rank_processes(driver.pid)
        os.kill(first[1], signal.SIGKILL)
        second = await_new_ranks(driver, first)
        os.kill(second[0], signal.SIGKILL)
        third = await_new_ranks(driver, second)
        await_restore(driver, run)
        os.kill(third[1], signal.SIGKILL)
        await_new_ranks(driver, third)
        await_restore(driver, run)
        os.kill(driver_process(driver.pid), signal.SIGTERM)

    # The pauses leave time to kill a rank in the midst of a step, and of a restore.
    pauses = "update:any:any:sleep:0.3,restore:any:any:sleep:1"
    end = broken_runs.train("train.steps=50", *RECOVERED, fault=pauses, act=kill_thrice_and_stop)
    facts = [json.loads((folder / "attempt.json").read_text()) for folder in attempts(run)]
    first_step = facts[1]["resumed_step"]
    assert first_step >= 1 and [fact["resumed_step"] for fact in facts] == [0, *[first_step] * 3], end.output
    assert end.status["resumed_step"] == first_step

    # The first step after the recovery is trained and saved.
    last_step = first_step + 1
    assert (end.exit_code, end.status["state"], end.status["step"], end.left) == (75, "stopped", last_step, [])
    assert f"SIGTERM: saved after step {last_step} of 50" in end.status["cause"]
    assert broken_runs.checkpoints() == [f"step_{last_step:06d}"]
    steps = steps_of(run)
    assert [step["step"] for step in steps] == list(range(1, last_step + 1))
    assert [step["fault/recoveries"] for step in steps if "fault/recoveries" in step] == [3.0]

    # The driver listens at one port from start to end, so no other program can take it between two attempts.
    addresses = re.findall(r"metrics at (\S+)/metrics", end.output)
    assert len(addresses) == 4 and len({*addresses}) == 1
