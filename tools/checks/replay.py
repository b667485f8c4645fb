"""Recorded steps are executed again: bit-equal in their layout, within 1e-5 in another; seeded bugs are found.

Each row of a layout is a run of six steps with train.record=all. Its last 4 or 6 steps are replayed in the run's
layout, and some in another one. A replay starts from the initial weights or a checkpoint. In the last rows a copy of
the package has a bug from one step on. `megarl replay --bisect` must name that step and the tensor.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import megarl
from tools.make_dataset import make_dataset
from tools.make_tiny_model import make_tiny_model
from tools.runs import DIGITS_REWARD, output_end, read_metrics, run_megarl, train

DURATION = {"small": "80 s (one layout and one bug)", "full": "15 to 25 minutes (13 layouts, two bugs)"}
SMALL = {"only": ["dp2", "advantage"], "steps": 3}

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
        "training/training_engine.py",
        "        # The schedule advances for skipped updates too",
        f"        if self.schedule.num_steps == {2 * FIRST_WRONG - 2}:\n"
        "            for name, parameter in self.parameters.items():\n"
        "                if 'layers.1.mlp.linear_fc2' in name:\n"
        "                    parameter.main_grad += 1e-4\n"
        "        # The schedule advances for skipped updates too",
        r"first in step 3, in .*\n(  .*\n)?  optimizer\.state\.exp_avg\.decoder\.layers\.mlp\.linear_fc2\.weight\[1\]",
    ),
}
"""Changed file of the copy, the replaced text, the new text, and a pattern of the output of --bisect."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=6, help="steps of each run")
    parser.add_argument("--only", action="append", choices=[*LAYOUTS, *BUGS], help="rows to make; default: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the steps to replay")


def make_inputs(folder: Path) -> None:
    """Write models, data, reward and recipe into a folder."""
    make_tiny_model(folder / "models/small", hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2)
    make_tiny_model(folder / "models/moe", family="qwen3_moe", num_layers=2)
    make_dataset(folder / "data", sft=8, train=64, heldout=8)
    (folder / "replay_reward.py").write_text(DIGITS_REWARD)
    (folder / "recipe.yaml").write_text(RECIPE)


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    draw = random.Random(options.seed)
    chosen = options.only or [*LAYOUTS, *BUGS]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make_inputs(folder)
        for name in (name for name in LAYOUTS if name in chosen):
            yield layout_row(folder, name, options.steps, draw)
        for name in (name for name in BUGS if name in chosen):
            yield bug_row(folder, name, options.steps)


def layout_row(folder: Path, name: str, steps: int, draw: random.Random) -> dict[str, Any]:
    ranks, overrides, other = LAYOUTS[name]
    run_name = re.sub(r"\W+", "_", name)
    train(
        "recipe.yaml", f"name={run_name}", f"train.steps={steps}", f"cluster.ranks_per_node={ranks}", *overrides,
        folder=folder,
    )  # fmt: skip
    metrics = [step for step in read_metrics(folder / f"runs/{run_name}") if "record/seconds" in step]
    # Without later checkpoints a replay of the last step executes all steps from here on: at least 4, so that the 13
    # layouts have 52 different ones. Step 0 are the initial weights.
    first = draw.choice(range(0, max(1, steps - 3), 2))
    for step in range(first + 2, steps, 2):
        shutil.rmtree(folder / f"runs/{run_name}/checkpoints/step_{step:06d}")
    equal, number = replayed(folder, run_name, steps)
    close, further = replayed(folder, run_name, draw.randint(2, steps), *other) if other else (True, 0)
    return {
        "row": name,
        "steps bit-equal": f"{equal} ({number})",
        "steps within 1e-5": f"{close} ({further})" if other else "-",
        "bytes per token": statistics.median(step["record/bytes_per_token"] for step in metrics),
        "record, s": statistics.median(step["record/seconds"] for step in metrics),
        "share of step": statistics.median(step["record/seconds"] / step["time/step_seconds"] for step in metrics),
        "met": equal == number and (not other or close == further),
    }


def replayed(folder: Path, run_name: str, step: int, *overrides: str) -> tuple[int, int]:
    """Replay a run up to a step. Returns the numbers of equal steps and of executed ones."""
    done = run_megarl("replay", f"runs/{run_name}", "--step", str(step), *overrides, folder=folder)
    lines = re.findall(r"^step \d+: (bit-equal|within 1e-5|differs)", done.stdout, re.MULTILINE)
    if not lines or (done.returncode and "differs" not in lines):
        raise SystemExit(f"megarl replay {run_name} --step {step} ended with {done.returncode}:\n{output_end(done)}")
    wanted = "within 1e-5" if overrides else "bit-equal"
    return sum(line == wanted for line in lines), len(lines)


def bug_row(folder: Path, name: str, steps: int) -> dict[str, Any]:
    """Train with and without a bug in a copy of the package. --bisect must find its first step and tensor."""
    file, before, after, expected = BUGS[name]
    common = ["recipe.yaml", f"train.steps={steps}", "cluster.ranks_per_node=2"]
    if not (folder / "runs/right").exists():
        train(*common, "name=right", folder=folder)
    copy = folder / f"copy_{len(list(folder.glob('copy_*')))}"
    shutil.copytree(Path(megarl.__file__).parent, copy / "megarl", ignore=shutil.ignore_patterns("__pycache__"))
    text = (copy / "megarl" / file).read_text()
    assert text.count(before) == 1, file
    (copy / "megarl" / file).write_text(text.replace(before, after))
    for part in ("models", "data", "recipe.yaml", "replay_reward.py"):
        (copy / part).symlink_to(folder / part)
    # The working folder comes first on the import path.
    done = subprocess.run(
        [sys.executable, "-m", "megarl", "train", *common, "name=wrong"], cwd=copy, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"the run with a bug ended with {done.returncode}:\n{output_end(done)}")
    found = run_megarl("replay", "runs/right", "--bisect", str(copy / "runs/wrong"), folder=folder)
    read = re.search(r"(\d+) of each run's records", found.stdout)
    return {
        "row": f"bug: {name}",
        "steps bit-equal": " ".join(found.stdout.splitlines()[1:2]).strip(),
        "steps within 1e-5": f"{read.group(1) if read else '?'} records of {steps} read",
        "met": re.search(expected, found.stdout) is not None,
    }
