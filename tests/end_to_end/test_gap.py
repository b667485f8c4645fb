"""A gap between trainer and engine beyond its limit: the run is saved and ends, or goes on without the updates."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.test_layouts import RECIPE
from tests.end_to_end.train_command import write_inputs
from tests.logged_steps import logged_steps
from tools.runs import run_megarl

pytestmark = pytest.mark.end_to_end


def test_a_step_beyond_the_limit_is_not_learnt_from(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    """Rounding alone is beyond 1e-12 nats. One update a step finds the gap in its pass, of two it is known before."""
    recipe = RECIPE.format(model=tiny_model()).replace("updates_per_step: 2", "updates_per_step: 1")
    write_inputs(tmp_path, recipe, num_problems=32)
    run = tmp_path / "runs/layout"

    def train(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_megarl("train", *arguments, folder=tmp_path)

    def metrics() -> list[dict[str, Any]]:
        return logged_steps(run)

    stopped = train("recipe.yaml", "train.max_logprob_gap=1e-12")
    assert stopped.returncode == 70, stopped.stdout + stopped.stderr
    cause = json.loads((run / "status.json").read_text())["cause"]
    assert "train.max_logprob_gap" in cause and "--resume" in cause
    assert (run / "checkpoints/latest").read_text() == "step_000001\n"
    step = metrics()[-1]
    assert (step["step"], step["train/gap_exceeded"], step["train/update_skipped"]) == (1, 1, 1)
    assert 0 < step["logprob_gap/mean"] < 1e-5

    skipped = train(str(run), "train.on_logprob_gap=skip", "train.updates_per_step=2", "--resume")
    assert skipped.returncode == 0, skipped.stdout + skipped.stderr
    step = metrics()[-1]
    assert (step["step"], step["train/gap_exceeded"]) == (2, 1) and "train/loss" not in step
    assert skipped.stdout.count("train/gap_exceeded counts") + skipped.stderr.count("train/gap_exceeded counts") == 1
    # Nothing was learnt: the policy is still the model that it began as.
    from safetensors.numpy import load_file

    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_model(), run / "hf"))
    assert all((before[name] == after[name]).all() for name in before)
