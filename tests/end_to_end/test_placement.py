"""Engines on ranks of their own: what is learned is what colocated engines' samples teach, also over a resume."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from tests.end_to_end.recorded_metrics import unknown_metrics
from tests.forked_command import MEGARL

pytestmark = pytest.mark.end_to_end

STEPS = 2


class Runs(NamedTuple):
    """The smallest case of the check `placement`: its row, and the folders of its runs."""

    compared: dict[str, Any]
    colocated: Path
    separate: Path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tool: Callable[[str], ModuleType]) -> Runs:
    check, folder = tool("checks.placement"), tmp_path_factory.mktemp("placement")
    check.make_inputs(folder)
    compared = check.compare(folder, "pp2 -> tp1 x 2", STEPS)
    return Runs(compared, *(next((folder / "runs").glob(f"{name}_*")) for name in ("colocated", "separate")))


def steps(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_the_weights_are_equal_and_nothing_is_moved_twice(runs: Runs) -> None:
    assert runs.compared["met"] and runs.compared["differing"] == 0
    assert runs.compared["moved_over_least"] == pytest.approx(1.0)


def test_the_same_is_sampled_and_measured(runs: Runs) -> None:
    colocated, separate = steps(runs.colocated), steps(runs.separate)
    assert [step["step"] for step in separate] == [step["step"] for step in colocated] == list(range(1, STEPS + 1))
    for own, other in zip(separate, colocated, strict=True):
        for name in ("reward/mean", "train/loss", "train/grad_norm", "val/heldout/accuracy", "rollout/sampled_tokens"):
            assert own[name] == pytest.approx(other[name], rel=1e-6), name
        assert own["logprob_gap/max"] <= 1e-5 and own["staleness/max"] == 0
        assert other.keys() - own.keys() == set()
        of_engines = {"perf/engine_pause_seconds", "rollout/replicas", "rollout/lost_requests"}
        of_engines |= {"time/reshard_meet_seconds"}
        of_both = {"time/trainers_idle", "time/rollout_waited_seconds"}
        # A resumed run's first step has its start's time, its first few no judgement of the balance.
        not_always = {"time/start_seconds", "rollout/balanced_ranks"}
        assert own.keys() - other.keys() - not_always == of_both | of_engines
        assert own["rollout/replicas"] == 2 and own["rollout/lost_requests"] == 0
        assert 0 < own["perf/engine_pause_seconds"] < own["time/step_seconds"]
        assert 0 < own["time/trainers_idle"] < 1 and own["memory/rollout_gib"] > 0.1
        # All that engines hold comes from others, and nothing from the ranks themselves.
        assert own["reshard/local_bytes"] == 0 and own["reshard/received_bytes"] == own["reshard/sent_bytes"] > 0
    assert unknown_metrics(runs.separate) == set()


def test_profile_logs_and_status_have_all_ranks(runs: Runs) -> None:
    trace = json.loads((runs.separate / "profiles/step_000001.json").read_text())
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert [name.split(" on ")[0] for name in names] == ["driver", *(f"rank {rank}" for rank in range(4))]
    found = {(event["pid"], event["name"]) for event in trace["traceEvents"] if event["ph"] == "X"}
    for process in (1, 2):
        assert (process, "policy.update") in found and (process, "advance") not in found
    for process in (3, 4):
        assert (process, "advance") in found and (process, "policy.update") not in found
    assert sorted(path.name for path in (runs.separate / "logs/latest").glob("rank_*")) == [
        f"rank_{rank:04d}.log" for rank in range(4)
    ]
    assert json.loads((runs.separate / "status.json").read_text())["state"] == "done"


def test_engines_that_share_their_ranks_go_to_sleep_before_the_last_reward_is_there(runs: Runs) -> None:
    trace = json.loads((runs.colocated / "profiles/step_000001.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    [sleeping] = [event for event in spans if event["pid"] == 0 and event["name"] == "sleep engines"]
    [rollout] = [event for event in spans if event["pid"] == 0 and event["name"] == "rollout"]
    assert rollout["ts"] < sleeping["ts"] < sleeping["ts"] + sleeping["dur"] <= rollout["ts"] + rollout["dur"]
    asleep = [event for event in spans if event["name"] == "sleep_engine"]
    assert sorted(event["pid"] for event in asleep) == [1, 2]


def test_a_report_is_made_of_both(runs: Runs, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    command = [*MEGARL, "report", str(runs.separate), str(runs.colocated), "--out", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and page.stat().st_size > 0, done.stderr
