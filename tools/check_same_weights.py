"""Train the tiny recipes at an earlier revision and here, and compare what they sampled and learned bit by bit.

    python tools/check_same_weights.py HEAD~1 [--only quickstart --only tiny_lora] [--steps 3]

A change that only moves or renames code leaves every hash as it is. Both sides run in float32 on two CPU ranks, with
the recipes of their own revision (or, for one that it lacks, this checkout's), from the same random models and data,
and with a reward that random answers earn too. Exits with 1 where a hash differs or a run fails.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[1]
INPUT = "runs/quickstart_input"
DENSE, EXPERTS = f"{INPUT}/model", f"{INPUT}/experts"
RECIPES = {
    "quickstart": DENSE,
    "tiny_ppo": DENSE,
    "tiny_lora": DENSE,
    "tiny_preference": DENSE,
    "tiny_moe": EXPERTS,
}
"""Recipes and the models they start from."""
REWARD = '''"""The share of digits in an answer: a reward that differs between random answers."""

from megarl.types import Reward


def digits(completion_text: str, answer: str, *, correct_score: float) -> Reward:
    share = sum(character.isdigit() for character in completion_text) / max(1, len(completion_text))
    return Reward(score=share, format_valid=True, answer_correct=share > 0.5)
'''


def make_inputs(folder: Path) -> None:
    """Models, data and reward in `folder`, by this checkout's tools."""
    for tool, out, *flags in (
        ("make_tiny_model.py", DENSE, "--num-layers", "2", "--initializer-range", "0.08"),
        ("make_tiny_model.py", EXPERTS, "--num-layers", "2", "--initializer-range", "0.08", "--family", "qwen3_moe"),
        ("make_dataset.py", f"{INPUT}/data", "--train", "600", "--heldout", "64", "--sft", "64"),
    ):
        command = [sys.executable, str(ROOT / "tools" / tool), "--out", str(folder / out), *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (folder / "share_of_digits.py").write_text(REWARD)


def run(code: Path, folder: Path, name: str, steps: int) -> str | None:
    """Train one recipe with the code of a checkout; what it printed where it failed."""
    recipe = code / f"launch/recipes/{name}.yaml"
    if not recipe.exists():
        recipe = ROOT / f"launch/recipes/{name}.yaml"
    overrides = [f"model.path={RECIPES[name]}", f"train.steps={steps}", "train.prompts_per_step=16"]
    overrides += ["optimizer.warmup_steps=1", "evaluation.max_problems=16"]
    if name != "tiny_preference":
        overrides += ["reward.functions=[share_of_digits:digits]", "train.samples_per_prompt=4"]
    if name == "tiny_ppo":
        overrides += ["critic.warmup_steps=1"]
    command = [sys.executable, "-m", "megarl", "train", str(recipe), *overrides]
    environment = os.environ | {"PYTHONPATH": str(code)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.stdout + done.stderr if done.returncode else None


def hashes(folder: Path) -> dict[str, str]:
    """sha256 of each exported model of a run (names, types, values), and of what it sampled."""
    found = {}
    for exported in sorted(folder.glob("*/*.safetensors")):
        digest = hashlib.sha256()
        with safe_open(exported, "numpy") as tensors:
            for name in sorted(tensors.keys()):
                values = tensors.get_tensor(name)
                digest.update(f"{name} {values.dtype} {values.shape}".encode())
                digest.update(values.tobytes())
        found[f"{exported.parent.name}/{exported.name}"] = digest.hexdigest()
    completions = hashlib.sha256()
    for file in sorted(folder.glob("samples/*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            completions.update(json.dumps(json.loads(line)["completion"]).encode())
    return found | {"completions": completions.hexdigest()}


def compare(earlier: Path, work: Path, name: str, steps: int) -> bool:
    """Run one recipe on both sides and print a line for each hash; whether all are equal."""
    sides = {}
    for side, code in (("earlier", earlier), ("here", ROOT)):
        folder = work / side
        if not folder.exists():
            folder.mkdir(parents=True)
            make_inputs(folder)
        if failure := run(code, folder, name, steps):
            print(f"{name:16} failed {side}: {failure[-3000:]}")
            return False
        sides[side] = hashes(folder / "runs" / name)
    for what in sorted(sides["earlier"].keys() | sides["here"].keys()):
        one, other = (sides[side].get(what, "absent") for side in ("earlier", "here"))
        verdict = "equal" if one == other else f"DIFFERS from {other[:16]}"
        print(f"{name:16} {what:44} {one[:16]} {verdict}", flush=True)
    return sides["earlier"] == sides["here"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="commit to compare this checkout with")
    parser.add_argument("--only", action="append", choices=RECIPES, help="compare this recipe; repeatable")
    parser.add_argument("--steps", type=int, default=3, help="steps of each run")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="megarl-same-weights-") as scratch:
        earlier, work = Path(scratch, "earlier"), Path(scratch, "work")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(earlier), options.revision], check=True)
        try:
            same = [compare(earlier, work, name, options.steps) for name in options.only or RECIPES]
        finally:
            subprocess.run([*git, "remove", "--force", str(earlier)], check=True)
    print(f"{len(same)} recipes, {same.count(False)} not the same")
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
