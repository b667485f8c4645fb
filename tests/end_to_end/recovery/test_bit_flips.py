"""weights.check_every: a flipped bit in trainer, engine or checkpoint ends the run, and the message names it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.manifest import file_record
from megarl.files.model_folder import CHECKSUMS
from tests.end_to_end.test_layouts import RECIPE
from tests.end_to_end.train_command import write_inputs
from tests.logged_steps import logged_steps
from tests.package_copy import copy_package
from tools.runs import run_megarl

pytestmark = pytest.mark.end_to_end

FLIP = """
        if self.weight_version == 2 and self.rank == {rank}:
            tensors = {tensors}
            name = [name for name in tensors if name.endswith("{name}")][0]
            tensors[name].detach().view(torch.int32).view(-1)[5] ^= 1 << 3
"""
"""Statements that flip a bit once the weights have version 2."""
LOSS = """
import sys

import torch


def loss(policy_logprobs, old_logprobs, advantages):
    return -advantages * policy_logprobs, {{}}


# The driver loads this file too, but has no worker.
if (module := sys.modules.get("megarl.worker.colocated")) is not None:
    sleep = module.Worker.sleep_engine

    def sleep_engine(self):
        {before}
        changes = sleep(self)
        {after}
        return changes

    module.Worker.sleep_engine = sleep_engine
"""
"""A run's own policy loss. The ranks that load it execute statements before or after an engine's sleep."""


@pytest.fixture
def train(tmp_path: Path, tiny_model: Callable[..., Path]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`train("NAME", "field=value", ...)` trains with checks at every step, and returns the ended program."""
    model = tiny_model(num_layers=2, num_heads=4, num_kv_heads=2)
    write_inputs(tmp_path, RECIPE.format(model=model), num_problems=32)

    def run(*overrides: str) -> subprocess.CompletedProcess[str]:
        return run_megarl("train", "recipe.yaml", "weights.check_every=1", *overrides, folder=tmp_path)

    return run


def flip_in_copy(folder: Path, file: str, before: str, statements: str) -> None:
    """Make a copy of megarl that executes `statements` before the line `before` of a file."""
    # The working folder comes first on the import path.
    path = copy_package(folder) / file
    text = path.read_text()
    assert text.count(before) == 1
    future = "from __future__ import annotations\n"
    path.write_text(text.replace(before, statements + before).replace(future, f"{future}\nimport torch\n"))


def versions(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"runs/{name}/versions.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_layouts_give_each_version_the_same_checksum(
    train: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Without an update the weights are equal; later versions differ in rounding only."""
    layouts = {
        "one": ["cluster.ranks_per_node=1"],
        "many": ["trainer.tp=2", "trainer.pp=2", "rollout.tp=2", "cluster.ranks_per_node=4"],
        "separate": ["rollout.placement=separate", "rollout.ranks=2", "rollout.tp=2", "cluster.ranks_per_node=3"],
    }
    found = {}
    for name, overrides in layouts.items():
        done = train(f"name={name}", *overrides)
        assert done.returncode == 0, done.stdout + done.stderr
        found[name] = versions(tmp_path, name)
        assert [(line["version"], line["step"]) for line in found[name]] == [(1, 0), (2, 1), (3, 2)]
        assert len({line["checksum"] for line in found[name]}) == 3
        exported = json.loads((tmp_path / f"runs/{name}/hf" / CHECKSUMS).read_text())
        assert exported["weights"] == found[name][-1]["checksum"]
    assert len({lines[0]["checksum"] for lines in found.values()}) == 1
    assert found["one"] == found["separate"]
    steps = logged_steps(tmp_path / "runs/one")
    assert all(step["time/weight_check_seconds"] > 0 for step in steps if step["step"])


def test_a_flip_in_the_trainer_is_named_before_the_update(
    train: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    flip = FLIP.format(rank=1, tensors="self.policy.tensors", name="linear_fc2.weight")
    (tmp_path / "flip.py").write_text(LOSS.format(before="", after=flip.strip()))
    loss = "algorithm.policy_loss=flip.py:loss"
    done = train("name=flip", loss, "trainer.tp=2", "cluster.ranks_per_node=2", "checkpoint.every_steps=1")
    assert done.returncode == 70, done.stdout + done.stderr
    assert "weights changed in the memory of trainer rank 1 on " in done.stderr
    assert "after the update of step 1 (version 2): model.layers.0.mlp.down_proj.weight[" in done.stderr
    assert [path.name for path in (tmp_path / "runs/flip/checkpoints").glob("step_*")] in ([], ["step_000001"])


def test_a_flip_in_an_engine_is_named_before_its_samples_are_trained(
    train: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    flip = FLIP.format(rank=0, tensors="dict(self.engine.model.named_parameters())", name="qkv_proj.weight")
    (tmp_path / "flip.py").write_text(LOSS.format(before=flip.strip(), after=""))
    loss = "algorithm.policy_loss=flip.py:loss"
    done = train("name=flip", loss, "trainer.dp=2", "rollout.tp=1", "cluster.ranks_per_node=2")
    assert done.returncode == 70, done.stdout + done.stderr
    assert "weights changed in the memory of engine rank 0 on " in done.stderr
    assert "after the reshard of step 1 (version 2): model.layers.0.self_attn.q_proj.weight[" in done.stderr


@pytest.mark.long
def test_a_flip_in_a_separate_engine_after_the_last_reshard_is_named(
    train: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    flip = FLIP.format(
        rank="self.rank",
        tensors="dict(self.rank_reshard._reshard_ends.engine.model.named_parameters())",
        name="embed_tokens.weight",
    )
    flip = flip.replace("if self.weight_version == 2 and self.rank == self.rank", "if True")
    flip_in_copy(
        tmp_path, "worker/reshard/cross_world_reshard.py", "        self._store_changes()\n        changes, self", flip
    )
    done = train(
        "name=flip", "rollout.placement=separate", "rollout.ranks=1", "cluster.ranks_per_node=2", "train.steps=1"
    )
    assert done.returncode == 70, done.stdout + done.stderr
    assert "weights changed in the memory of engine rank 1 on " in done.stderr
    assert "after the reshard of step 1 (version 2): model.embed_tokens.weight[" in done.stderr


def test_a_checkpoint_of_other_weights_is_refused_on_resume(
    train: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """The weights loaded in another layout have the saved checksum; a checkpoint with another one is refused."""
    done = train("name=saved", "cluster.ranks_per_node=1", "checkpoint.every_steps=1", "train.steps=1")
    assert done.returncode == 0, done.stdout + done.stderr
    saved = tmp_path / "runs/saved/checkpoints/step_000001"
    driver = json.loads((saved / "driver.json").read_text())
    assert driver["checksum"] == versions(tmp_path, "saved")[-1]["checksum"]
    split = ["trainer.tp=2", "rollout.tp=2", "cluster.ranks_per_node=2", "train.steps=2", "--resume"]
    shutil.copytree(tmp_path / "runs/saved", tmp_path / "runs/copy")
    done = train("name=saved", *split)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["version"] for line in versions(tmp_path, "saved")] == [1, 2, 3]

    folder = tmp_path / "runs/copy/checkpoints/step_000001"
    (folder / "driver.json").write_text(json.dumps(driver | {"checksum": "0123456789abcdef"}))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["driver.json"] = file_record(folder / "driver.json")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    done = train("name=copy", *split)
    assert done.returncode == 65, done.stdout + done.stderr
    assert "the weights loaded from the checkpoint of step 1 have the checksum " + driver["checksum"] in done.stderr
