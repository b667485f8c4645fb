"""A run that is broken again and again, by faults drawn with a seed, and resumed: it ends as one that was left alone.

`--kills` is the number of faults.
"""

from __future__ import annotations

import random

import pytest

from megarl.checkpoint.manifest import file_record
from megarl.tracking.draws import account
from tests.faults.broken_runs import BrokenRuns
from tests.logged_steps import logged_steps

pytestmark = [pytest.mark.end_to_end, pytest.mark.fault_runs, pytest.mark.timeout(7200)]

SEED = 7
FAULTS = {
    "backward:{rank}:{step}:kill": {76},
    "construct:{rank}:0:exit": {76},
    "gradients:{rank}:{step}:stop": {76},
    "update:{rank}:{step}:raise": {70},
    "gradients:{rank}:{step}:terminate": {75},
    "save_write:{rank}:{save}:kill": {76},
    "save_finish:{rank}:{save}:disk_full": {74},
    "save_write:{rank}:{save}:io_error": {70, 74},
    "manifest:driver:{save}:kill": {-9},
    "latest:driver:{save}:kill": {-9},
    "log:driver:{step}:disk_full": {74},
    "log:driver:{step}:kill": {-9},
    # A slow rank alone ends no run.
    "gradients:{rank}:{step}:sleep:2,log:driver:{step}:kill": {-9},
}
"""Faults, and the exit codes of the run that they end."""
OVERRIDES = (
    "cluster.max_restarts=1000", "cluster.verb_timeout_seconds=5",
    "cluster.collective_timeout_seconds=15", "checkpoint.keep=2",
)  # fmt: skip


def outcome(runs: BrokenRuns) -> tuple[list[dict[str, float]], dict[str, object]]:
    """Return the metrics of all steps without times, and the hash of the exported weights."""
    untimed = ("time/", "perf/", "memory/", "plan/")
    steps = [
        {name: value for name, value in line.items() if not name.startswith(untimed)} for line in logged_steps(runs.run)
    ]
    return steps, file_record(runs.run / "hf/model.safetensors")


def test_row_51_random_faults(broken_runs: BrokenRuns, num_kills: int) -> None:
    # A fault costs two steps at most, and lets a resumed run gain as many.
    num_steps = 10 + 2 * num_kills
    overrides = (*OVERRIDES, f"train.steps={num_steps}")
    assert broken_runs.train(*overrides).exit_code == 0
    calm = outcome(broken_runs)
    drawn = random.Random(SEED)
    choices: list[str] = []
    longest = 0.0
    for number in range(num_kills):
        # Each kind once, then all again in another order.
        choices = choices or drawn.sample(sorted(FAULTS), len(FAULTS))
        fault = choices.pop()
        saved = [int(name.removeprefix("step_")) for name in broken_runs.checkpoints() if name.startswith("step_")]
        first = 1 + max(saved, default=0) * (number > 0)
        step = min(num_steps, first + drawn.randrange(2))
        text = fault.format(rank=drawn.randrange(2), step=step, save=step + step % 2)
        end = broken_runs.train(*overrides, "--resume" if number else "--restart", fault=text)
        assert end.exit_code in FAULTS[fault] and end.left == [], (text, end.output)
        longest = max(longest, end.seconds)
    end = broken_runs.train(*overrides, "--resume")
    assert end.exit_code == 0, end.output
    assert outcome(broken_runs) == calm
    # Replaces the time of the last run, which had no fault.
    broken_runs.record("seconds", round(longest, 2))
    ledger = account(broken_runs.run)
    assert (ledger.faults, ledger.last_step) == ([], num_steps)
