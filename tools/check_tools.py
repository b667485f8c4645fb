"""The tool recipe learns to call the calculator, and what it learns is in the calculator's replies.

    python tools/check_tools.py --seeds 0 1 2

For each seed: a tiny model, SFT (`launch/recipes/tiny_tools_sft.yaml`), GRPO (`tiny_tools.yaml`), and GRPO with replies
that are products of other numbers. Prints a table and fails where, before GRPO, more than a fifth of the samples call
the tool, GRPO gains less than 0.30 on held-out problems, or the wrong replies let it gain 0.05 or more.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megarl.environments.calculator import Calculator, as_text, evaluate
from megarl.environments.tools import tool

ROOT = Path(__file__).resolve().parents[1]
MAX_CALLED = 0.2
MIN_GAIN = 0.3
MAX_GAIN_WITHOUT_REPLIES = 0.05


class WrongReplies(Calculator):
    """A calculator that replies with the product of other numbers, the same ones whenever it is asked the same."""

    @tool
    async def calculator(self, expression: str) -> str:
        """The value of an arithmetic expression."""
        generator = random.Random(expression)
        return as_text(evaluate(f"{generator.randint(100, 999)} * {generator.randint(100, 999)}"))


def run(*command: str) -> float:
    """Run a program from the repository's root; how many seconds it took. Raises where it fails."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return time.perf_counter() - start


def metrics_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def accuracies(steps: Sequence[dict[str, float]]) -> list[float]:
    return [step["val/heldout/accuracy"] for step in steps if "val/heldout/accuracy" in step]


def check_seed(folder: Path, seed: int, overrides: Sequence[str]) -> list[str]:
    """Train with one seed, print a line of the table. Returns what fell short."""
    data, model = folder / "data", folder / "model"
    made = run(
        "tools/make_tiny_model.py", "--out", str(model), "--num-layers", "2", "--initializer-range", "0.08",
        "--tool-words", "--seed", str(seed),
    )  # fmt: skip
    made += run("tools/make_tool_data.py", "--out", str(data), "--seed", str(seed))
    common = [
        f"runs_folder={folder}", f"seed={seed}", f"data.train={data}/sft.jsonl",
        f"data.validation.heldout={data}/heldout.jsonl",
    ]  # fmt: skip
    sft = run("-m", "megarl", "train", "launch/recipes/tiny_tools_sft.yaml", f"model.path={model}", *common, *overrides)
    common[2] = f"data.train={data}/train.jsonl"
    common.append(f"model.path={folder}/tiny_tools_sft/hf")
    rl = run("-m", "megarl", "train", "launch/recipes/tiny_tools.yaml", *common)
    wrong = ["name=wrong_replies", "rollout.environment=tools/check_tools.py:WrongReplies"]
    run("-m", "megarl", "train", "launch/recipes/tiny_tools.yaml", *common, *wrong)

    steps = metrics_of(folder / "tiny_tools")
    called = next(step["tools/calculator/calls"] for step in steps if "tools/calculator/calls" in step)
    first, *_, last = accuracies(steps)
    wrong_first, *_, wrong_last = accuracies(metrics_of(folder / "wrong_replies"))
    minutes = (made + sft + rl) / 60
    print(
        f"seed {seed}: calls before GRPO {called:.3f}, held-out {first:.3f} -> {last:.3f}, "
        f"with wrong replies {wrong_first:.3f} -> {wrong_last:.3f}, {minutes:.1f} minutes with SFT",
        flush=True,
    )
    found = []
    if called > MAX_CALLED:
        found.append(f"seed {seed}: {called:.3f} of the samples call the tool before GRPO, {MAX_CALLED} are allowed")
    if last - first < MIN_GAIN:
        found.append(f"seed {seed}: GRPO gains {last - first:.3f}, less than {MIN_GAIN}")
    if wrong_last - wrong_first >= MAX_GAIN_WITHOUT_REPLIES:
        found.append(f"seed {seed}: with wrong replies GRPO gains {wrong_last - wrong_first:.3f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/check_tools"), help="folder for the runs, new")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", help="overrides of the SFT recipe")
    arguments = parser.parse_args()
    found = []
    for seed in arguments.seeds:
        found += check_seed((arguments.out / f"seed_{seed}").resolve(), seed, arguments.overrides)
    if found:
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
