"""A real run that cannot learn: it says so, stops where it is asked to, and does not repeat itself after a resume."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.end_to_end

STUCK = ["no_gradient", "constant_reward", "truncated", "no_end_of_sequence"]


def test_a_run_that_cannot_learn_stops_and_a_resume_does_not_warn_twice(
    tmp_path: Path, tiny_model: Callable[..., Path], tool: Callable[[str], ModuleType]
) -> None:
    check = tool("checks.health")
    model = tiny_model(num_heads=2, num_kv_heads=2, hidden_size=64, head_dim=32, intermediate_size=96, num_layers=1)
    (tmp_path / "recipe.yaml").write_text(check.RECIPE.replace("path: model", f"path: {model}"))
    (tmp_path / "graders.py").write_text(check.GRADERS)
    tool("make_dataset").make_dataset(tmp_path / "data", sft=8, train=32, heldout=8)

    stopped = check.train(tmp_path, "stuck", "train.on_unhealthy=stop", "train.steps=3")
    assert stopped.returncode == 79, stopped.stdout + stopped.stderr
    assert "train.on_unhealthy = stop: health, no_gradient: reward/zero_variance_groups is 1 " in stopped.stderr
    assert warnings(stopped) == STUCK and check.broken_rules(tmp_path, "stuck") == STUCK
    status = json.loads((tmp_path / "runs/stuck/status.json").read_text())
    assert (status["step"], status["exit_code"]) == (2, 79) and (
        tmp_path / "runs/stuck/checkpoints/step_000002"
    ).is_dir()

    resumed = check.train(tmp_path, "stuck", "train.steps=3", "optimizer.learning_rate=0.5", "--resume")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert warnings(resumed) == ["learning_rate"]
    assert check.broken_rules(tmp_path, "stuck") == [*STUCK, "learning_rate"]


def warnings(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The rules that warned on a run's screen, in order."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("warning: health, ")]
    return [line.removeprefix("warning: health, ").partition(":")[0] for line in lines]
