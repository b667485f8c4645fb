"""The tiny recipes sample and learn the same here as at an earlier revision, bit by bit.

    python tools/check.py same_weights HEAD~1 [--only quickstart --only tiny_lora] [--steps 3]

A change that only moves or renames code leaves every hash as it is. Both sides run in float32 on two CPU ranks, with
the recipes of their own revision (or, for one that it lacks, this checkout's), from the same random models and data,
and with a reward that random answers earn too. A row per file of weights and for the completions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tools.make_dataset import make_dataset
from tools.make_tiny_model import make_tiny_model
from tools.runs import DIGITS_REWARD, ROOT, output_end, read_lines

DURATION = {"small": "60 s (quickstart)", "full": "190 s of CPU time with --steps 2: six recipes on both sides"}
SMALL = {"only": ["quickstart"], "steps": 2}
INPUT = "runs/quickstart_input"
DENSE, EXPERTS, DRAFTING = f"{INPUT}/model", f"{INPUT}/experts", f"{INPUT}/drafting"
RECIPES = {
    "quickstart": DENSE,
    "tiny_ppo": DENSE,
    "tiny_lora": DENSE,
    "tiny_preference": DENSE,
    "tiny_moe": EXPERTS,
    "quickstart_mtp": DRAFTING,
}
"""Recipes and the models they start from."""
VARIANTS = {
    "quickstart_mtp": (
        "quickstart",
        (
            "trainer.mtp_loss_coefficient=0.2",
            "rollout.vllm={speculative_config: {method: mtp, num_speculative_tokens: 2}}",
        ),
    ),
}
"""Recipes that are other ones with further settings: the other one's name, and the settings."""


def make_inputs(folder: Path) -> None:
    """Write models, data and reward, by this checkout's tools."""
    make_tiny_model(folder / DENSE, num_layers=2, initializer_range=0.08)
    make_tiny_model(folder / EXPERTS, num_layers=2, initializer_range=0.08, family="qwen3_moe")
    make_tiny_model(folder / DRAFTING, num_layers=2, initializer_range=0.08, family="glm4_moe", num_mtp_layers=1)
    make_dataset(folder / INPUT / "data", train=600, heldout=64, sft=64)
    (folder / "share_of_digits.py").write_text(DIGITS_REWARD)


def train(code: Path, folder: Path, name: str, steps: int) -> str:
    """Train one recipe with the code of a checkout. Returns an empty text, or what the run printed if it failed."""
    file_name, further = VARIANTS.get(name, (name, ()))
    recipe = code / f"launch/recipes/{file_name}.yaml"
    if not recipe.exists():
        recipe = ROOT / f"launch/recipes/{file_name}.yaml"
    overrides = [
        f"name={name}",
        *further,
        f"model.path={RECIPES[name]}",
        f"train.steps={steps}",
        "train.prompts_per_step=16",
    ]
    overrides += ["optimizer.warmup_steps=1", "evaluation.max_problems=16"]
    if name != "tiny_preference":
        overrides += ["reward.functions=[share_of_digits:digits]", "train.samples_per_prompt=4"]
    if name == "tiny_ppo":
        overrides += ["critic.warmup_steps=1"]
    command = [sys.executable, "-m", "megarl", "train", str(recipe), *overrides]
    environment = os.environ | {"PYTHONPATH": str(code)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return output_end(done) if done.returncode else ""


def hashes(folder: Path) -> dict[str, str]:
    """Return the sha256 of each exported model of a run (names, types, values), and of its completions."""
    hashes_by_file = {}
    for exported in sorted(folder.glob("*/*.safetensors")):
        digest = hashlib.sha256()
        with safe_open(exported, "numpy") as tensors:
            for name in sorted(tensors.keys()):
                values = tensors.get_tensor(name)
                digest.update(f"{name} {values.dtype} {values.shape}".encode())
                digest.update(values.tobytes())
        hashes_by_file[f"{exported.parent.name}/{exported.name}"] = digest.hexdigest()
    completions = hashlib.sha256()
    for file in sorted(folder.glob("samples/*.jsonl")):
        for sample in read_lines(file):
            completions.update(json.dumps(sample["completion"]).encode())
    return hashes_by_file | {"completions": completions.hexdigest()}


def compare(earlier: Path, work: Path, name: str, steps: int) -> Iterator[dict[str, Any]]:
    """Run one recipe on both sides. Yields a row for each hash."""
    sides: dict[str, dict[str, str]] = {}
    for side, code in (("earlier", earlier), ("here", ROOT)):
        folder = work / side
        if not folder.exists():
            folder.mkdir(parents=True)
            make_inputs(folder)
        if failure := train(code, folder, name, steps):
            yield {"recipe": name, "file": f"the run failed {side}: {failure}", "met": False}
            return
        sides[side] = hashes(folder / "runs" / name)
    for file in sorted(sides["earlier"].keys() | sides["here"].keys()):
        earlier_hash, hash_here = (sides[side].get(file, "absent") for side in ("earlier", "here"))
        yield {
            "recipe": name,
            "file": f"{file:40}",
            "earlier": earlier_hash[:16],
            "here": hash_here[:16],
            "met": earlier_hash == hash_here,
        }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("revision", help="commit to compare this checkout with")
    parser.add_argument("--only", action="append", choices=RECIPES, help="compare this recipe; repeatable")
    parser.add_argument("--steps", type=int, default=3, help="steps of each run")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="megarl-same-weights-") as scratch:
        earlier, work = Path(scratch, "earlier"), Path(scratch, "work")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(earlier), options.revision], check=True)
        try:
            for name in options.only or RECIPES:
                yield from compare(earlier, work, name, options.steps)
        finally:
            subprocess.run([*git, "remove", "--force", str(earlier)], check=True)
