"""Faults of trainer ranks in a run of two: the first cause is named, the exit code is right, nothing is left."""

from __future__ import annotations

import pytest

from tests.faults.broken_runs import BrokenRuns

pytestmark = [pytest.mark.end_to_end, pytest.mark.fault_runs]


def test_row_1_a_rank_killed_between_forward_and_backward_pass(broken_runs: BrokenRuns) -> None:
    end = broken_runs.train(fault="backward:1:3:kill")
    assert end.exit_code == 76 and end.left == [], end.output
    assert end.seconds < 30.0
    assert (end.status["state"], end.status["exit_code"], end.status["rank"]) == ("failed", 76, 1)
    assert (
        "rank 1 of 2 was killed by SIGKILL" in end.status["cause"] and "during `policy.update`" in end.status["cause"]
    )
    # The run goes on from the last checkpoint, and the fault does not come back.
    assert broken_runs.train("--resume").status["state"] == "done"


def test_row_3_a_rank_that_raises(broken_runs: BrokenRuns) -> None:
    end = broken_runs.train(fault="update:1:1:raise")
    assert end.exit_code == 70 and end.left == [], end.output
    assert end.status["cause"].count("InjectedFaultError") == 1 and end.status["rank"] == 1
    # The other rank's error, a lost peer in a collective, is not shown.
    assert "rank 0 of 2 raised" not in end.output


def test_row_2_a_rank_stopped_in_an_update(broken_runs: BrokenRuns) -> None:
    limits = ("cluster.verb_timeout_seconds=5", "cluster.collective_timeout_seconds=20")
    end = broken_runs.train(*limits, fault="gradients:1:2:stop")
    assert end.exit_code == 76 and end.left == [], end.output
    assert 5.0 <= end.seconds < 20.0 + 30.0
    assert (end.status["state"], end.status["rank"]) == ("failed", 1)
    assert end.status["cause"].startswith("RankLostError: rank 1 of 2 did not answer `policy.update` within")
    report = (broken_runs.run / "logs/latest/hang_1.txt").read_text()
    assert "first silent rank: 1\n" in report and ": T (stopped)" in report


def test_row_41_a_slow_rank_is_reported_with_its_call(broken_runs: BrokenRuns) -> None:
    end = broken_runs.train("train.steps=5", fault="update:1:5:sleep:20")
    assert end.exit_code == 0 and end.left == [], end.output
    notices = (broken_runs.run / "logs/latest/notices.jsonl").read_text()
    assert "rank 1 of 2 is slow in `policy.update`: other ranks wait" in notices


def test_row_42_host_memory_runs_out(broken_runs: BrokenRuns) -> None:
    end = broken_runs.train("trainer.max_tokens_per_microbatch=4096", fault="update:1:2:memory")
    assert end.exit_code == 76 and end.left == [], end.output
    assert end.status["rank"] == 1 and "out of" in end.status["cause"] and "memory" in end.status["cause"]
