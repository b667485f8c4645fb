"""Recorded steps are executed again: bit-equal in their layout, within 1e-5 in another; seeded bugs are found.

A run of six steps has train.record=all. Its last 4 or 6 steps are replayed in the run's layout, and some in another
one. A replay starts from the initial weights or a checkpoint. For each bug a copy of the package has it from one step
on, and `megarl replay --bisect` must name that step and the tensor.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.package_copy import copy_package
from tools.make_dataset import make_dataset
from tools.make_tiny_model import make_tiny_model
from tools.runs import DIGITS_REWARD, output_end, run_megarl, train

pytestmark = [pytest.mark.end_to_end, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 6
RECIPE = """
name: replay
loop: rl
model: {path: models/small, dtype: float32}
data: {train: data/train.jsonl, max_prompt_tokens: 96}
trainer: {max_tokens_per_microbatch: 512}
optimizer: {learning_rate: 1e-3}
rollout: {kv_cache_gib: 0.25, sampling: {max_new_tokens: 24}}
reward: {functions: ["replay_reward:digits"]}
algorithm: {kl_coefficient: 0.1}
checkpoint: {every_steps: 2, keep: 10}
train: {prompts_per_step: 6, samples_per_prompt: 4, updates_per_step: 2, record: all}
"""
MOE = ("model.path=models/moe",)
LAYOUTS: dict[str, tuple[int, Sequence[str], Sequence[str]]] = {
    "one rank": (1, [], []),
    "dp2": (2, [], ["trainer.tp=2"]),
    "tp2": (2, ["trainer.tp=2", "rollout.tp=2"], ["trainer.tp=1"]),
    "tp2 without sp": (2, ["trainer.tp=2", "trainer.sequence_parallel=false"], ["trainer.tp=1", "trainer.pp=2"]),
    "pp2": (2, ["trainer.pp=2"], ["trainer.pp=1"]),
    "pp2 vpp2": (2, ["trainer.pp=2", "trainer.vpp=2"], ["trainer.pp=1", "trainer.vpp=1"]),
    "cp2": (2, ["trainer.cp=2"], ["trainer.cp=1"]),
    "tp2 pp2": (4, ["trainer.tp=2", "trainer.pp=2"], ["trainer.pp=1", "trainer.cp=2"]),
    "dp2, plain optimizer": (2, ["trainer.distributed_optimizer=false"], ["trainer.tp=2"]),
    "moe ep2": (2, [*MOE, "trainer.ep=2"], ["trainer.ep=1"]),
    "lora": (2, ["lora.rank=4"], ["trainer.tp=2"]),
    "ppo": (2, ["algorithm.preset=ppo", "algorithm.kl_coefficient=0.1"], ["trainer.tp=2"]),
    "separate engines": (
        3,
        [
            "rollout.placement=separate",
            "rollout.ranks=1",
            "rollout.max_staleness=1",
            "algorithm.importance_sampling=tis",
        ],
        ["trainer.tp=2"],
    ),
}
"""Ranks of the run, its overrides, and the overrides of the other layout, by name."""
TWO_RANKS = (f"train.steps={STEPS}", "cluster.ranks_per_node=2")
FIRST_WRONG = 3
BUGS: dict[str, tuple[str, str, str, str]] = {
    "advantage": (
        "rollout/step/advantages.py",
        "    return metrics\n\n\ndef compute_advantages",
        f"    if weight_version >= {FIRST_WRONG}:\n"
        "        batch.per_token['advantages'][batch.cu_samples[5] : batch.cu_samples[6]] += 0.01\n"
        "    return metrics\n\n\ndef compute_advantages",
        r"first in step 3, in advantages .*\n  advantages of sample 5, token 0",
    ),
    "gradient of layer 1": (
        "training/optimizer_step.py",
        "        # The schedule advances for skipped updates too",
        f"        if self._schedule.num_steps == {2 * FIRST_WRONG - 2}:\n"
        "            for name, parameter in self._model.parameters.items():\n"
        "                if 'layers.1.mlp.linear_fc2' in name:\n"
        "                    parameter.main_grad += 1e-4\n"
        "        # The schedule advances for skipped updates too",
        r"first in step 3, in .*\n(  .*\n)?  optimizer\.state\.exp_avg\.decoder\.layers\.mlp\.linear_fc2\.weight\[1\]",
    ),
}
"""Changed file of the copy, the replaced text, the new text, and a pattern of the output of --bisect."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, data, reward and recipe."""
    folder = tmp_path_factory.mktemp("replay")
    make_tiny_model(folder / "models/small", hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2)
    make_tiny_model(folder / "models/moe", family="qwen3_moe", num_layers=2)
    make_dataset(folder / "data", sft=8, train=64, heldout=8)
    (folder / "replay_reward.py").write_text(DIGITS_REWARD)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_layout_is_replayed(folder: Path, name: str) -> None:
    draw = random.Random(name)
    ranks, overrides, other_layout = LAYOUTS[name]
    run_name = re.sub(r"\W+", "_", name)
    train(
        "recipe.yaml", f"name={run_name}", f"train.steps={STEPS}", f"cluster.ranks_per_node={ranks}", *overrides,
        folder=folder,
    )  # fmt: skip
    # Without later checkpoints a replay of the last step executes all steps from here on, at least 4. Step 0 are the
    # initial weights.
    first = draw.choice(range(0, STEPS - 3, 2))
    for step in range(first + 2, STEPS, 2):
        shutil.rmtree(folder / f"runs/{run_name}/checkpoints/step_{step:06d}")
    verdicts = replay(folder, run_name, STEPS)
    assert verdicts == ["bit-equal"] * (STEPS - first)
    if other_layout:
        assert set(replay(folder, run_name, draw.randint(2, STEPS), *other_layout)) == {"within 1e-5"}


def replay(folder: Path, run_name: str, step: int, *overrides: str) -> list[str]:
    """Replay a run up to a step. Returns the verdict of each executed step."""
    done = run_megarl("replay", f"runs/{run_name}", "--step", str(step), *overrides, folder=folder)
    verdicts = re.findall(r"^step \d+: (bit-equal|within 1e-5|differs)", done.stdout, re.MULTILINE)
    assert verdicts, output_end(done)
    return verdicts


@pytest.fixture(scope="module")
def right(folder: Path) -> Path:
    """The run without a bug."""
    train("recipe.yaml", *TWO_RANKS, "name=right", folder=folder)
    return folder / "runs/right"


@pytest.mark.parametrize("name", list(BUGS))
def test_a_bug_is_found(folder: Path, right: Path, tmp_path: Path, name: str) -> None:
    file, before, after, expected = BUGS[name]
    module = copy_package(tmp_path) / file
    assert module.read_text().count(before) == 1
    module.write_text(module.read_text().replace(before, after))
    for part in ("models", "data", "recipe.yaml", "replay_reward.py"):
        (tmp_path / part).symlink_to(folder / part)
    # The working folder comes first on the import path.
    command = [sys.executable, "-m", "megarl", "train", "recipe.yaml", *TWO_RANKS, "name=wrong"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, output_end(done)
    report = run_megarl("replay", str(right), "--bisect", str(tmp_path / "runs/wrong"), folder=folder).stdout
    assert re.search(expected, report), report
