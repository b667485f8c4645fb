"""trainer.exact over updates and reshards: each sampled token has one log-prob, and a changed operator ends the run."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.test_layouts import RECIPE
from tests.end_to_end.train_command import write_inputs
from tests.logged_steps import logged_steps
from tests.package_copy import copy_package
from tools.runs import run_megarl

pytestmark = pytest.mark.end_to_end

SUM = "values.float() + residual.to(values.dtype).float()"
ROUNDED_SUM = "(values + residual.to(values.dtype)).float()"


@pytest.fixture
def train(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> Callable[..., tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]]:
    """`train("NAME", "field=value", ...)` trains and returns the ended program and the metrics of its steps."""
    model = tiny_model(num_layers=2, num_heads=4, num_kv_heads=2)
    recipe = RECIPE.format(model=model).replace("updates_per_step: 2", "updates_per_step: 1")
    write_inputs(tmp_path, recipe, num_problems=32)

    def run(name: str, *overrides: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
        fields = (f"name={name}", "model.dtype=bfloat16", "trainer.exact=true", *overrides)
        done = run_megarl("train", "recipe.yaml", *fields, folder=tmp_path)
        lines = logged_steps(tmp_path / f"runs/{name}")
        return done, [line for line in lines if "logprob_gap/mean" in line]

    return run


def test_split_trainers_and_engines_are_bit_equal(train: Callable[..., Any]) -> None:
    done, steps = train("equal", "trainer.tp=2", "trainer.pp=2", "rollout.tp=1", "cluster.ranks_per_node=4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(steps) == 2
    for step in steps:
        assert (step["logprob_gap/max"], step["logprob_gap/bit_equal"], step["logprob_gap/measured"]) == (0, 1, 1)
        assert step["train/grad_norm"] > 0 and not step["train/update_skipped"]


def test_experts_with_adapters_are_bit_equal(train: Callable[..., Any], tiny_model: Callable[..., Path]) -> None:
    model = tiny_model(family="qwen3_moe", num_layers=2, num_heads=4, num_kv_heads=2, experts_per_token=4)
    layout = ("trainer.tp=2", "trainer.etp=2", "rollout.tp=1", "cluster.ranks_per_node=2")
    done, steps = train("experts", f"model.path={model}", "lora.rank=4", *layout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(steps) == 2
    for step in steps:
        assert (step["logprob_gap/max"], step["logprob_gap/bit_equal"], step["logprob_gap/measured"]) == (0, 1, 1)
        assert step["train/grad_norm"] > 0


@pytest.mark.long
def test_an_operator_that_rounds_otherwise_ends_the_run(train: Callable[..., Any], tmp_path: Path) -> None:
    """The copy's trainer rounds each residual sum before the norm, as Megatron does."""
    # The working folder comes first on the import path.
    file = copy_package(tmp_path) / "models/exact/residual.py"
    assert SUM in file.read_text()
    file.write_text(file.read_text().replace(SUM, ROUNDED_SUM))
    done, [step] = train("changed", "cluster.ranks_per_node=1")
    assert done.returncode == 70, done.stdout + done.stderr
    assert "trainer.exact = True: the trainer's log-probs of step 1" in done.stderr
    assert 0 < step["logprob_gap/mean"] < 0.1 and step["logprob_gap/bit_equal"] < 1
    assert (step["train/gap_exceeded"], step["train/update_skipped"]) == (1, 1)
