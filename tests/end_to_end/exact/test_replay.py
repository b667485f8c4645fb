"""Replay: a recorded step is bit-equal in its layout, within 1e-5 in another, and a change shows its effect."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.loops.commands import bisection, replaying
from megarl.rollout.step.step_record import record_folder
from megarl.types import ConfigError
from tests.end_to_end.test_layouts import RECIPE
from tests.end_to_end.train_command import train, write_inputs
from tools.runs import run_megarl

pytestmark = pytest.mark.end_to_end


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Path:
    """The folder of a run of three steps on two data-parallel ranks, with a checkpoint of step 1."""
    folder = tmp_path_factory.mktemp("replay")
    model = tiny_model(num_layers=2, num_heads=4, num_kv_heads=2)
    write_inputs(folder, RECIPE.format(model=model), num_problems=32)
    train(
        folder, "recipe.yaml", "name=run", "train.steps=3", "train.record=all", "checkpoint.every_steps=1",
        "checkpoint.keep=3", "cluster.ranks_per_node=2", "trainer.dp=2",
    )  # fmt: skip
    for step in (2, 3):
        shutil.rmtree(folder / f"runs/run/checkpoints/step_{step:06d}")
    return folder


def test_a_step_is_bit_equal_and_a_changed_record_is_named(folder: Path) -> None:
    """Step 2 is executed as recorded. In the record of step 3 a copy has another gradient of layer 1."""
    shutil.copytree(folder / "runs/run", folder / "runs/changed")
    file = record_folder(folder / "runs/changed/records", 3) / "record.json"
    record = json.loads(file.read_text())
    moment = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight[1]"
    part = record["state"][moment][-1]
    part[1] = f"{int(part[1], 16) ^ 1:016x}"
    chain = file.with_name("chain")
    chain.write_text(chain.read_text()[::-1])
    file.write_text(json.dumps(record))
    done = run_megarl("replay", "runs/changed", "--step", "3", folder=folder)
    assert done.returncode == 70, done.stdout + done.stderr
    assert "step 2: bit-equal to its record" in done.stdout
    assert f"step 3: differs from its record, first in {moment}" in done.stdout
    assert f"{moment} on rank {part[0]}" in done.stdout and done.stdout.count("relative distance") == 1

    found = bisection.bisect(folder / "runs/run", folder / "runs/changed")
    assert (found.step, found.last_step) == (3, 3)
    assert [(one.tensor, one.place) for one in found.differences] == [(moment, f"on rank {part[0]}")]


def test_another_layout_agrees_and_a_change_has_an_effect_on_each_sample(folder: Path) -> None:
    changes = ("trainer.tp=2", "trainer.dp=1", "--set", "algorithm.kl_coefficient=0.5")
    done = run_megarl("replay", "runs/run", "--step", "2", *changes, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2: within 1e-5 (state tensors 1e-4) of its record" in done.stdout
    assert "algorithm.kl_coefficient: 0.1 -> 0.5" in done.stdout
    rows = [line.split("\t") for line in done.stdout.splitlines() if line.count("\t") == 5]
    assert len(rows) == 1 + 4 * 4
    changed = [float(row[4].split()[1]) for row in rows[1:]]
    assert any(change != 0 for change in changed) and all(abs(change) < 1 for change in changed)


@pytest.mark.parametrize(
    ("step", "changes", "message"),
    [
        (4, (), "has none of step 4; it has steps 1 to 3"),
        (2, ("optimizer.learning_rate=1",), r"a replayed step can change algorithm\.\*, reward\.\*"),
        (2, ("algorithm.kl_coefficient=0.1",), "the run already has this value"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: int, changes: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=message):
        replaying.prepare(Path("runs/run"), step, (), changes)
