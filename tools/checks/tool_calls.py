"""The tool recipe learns to call the calculator, and learns from the calculator's replies.

For each seed: a tiny model, SFT (`launch/recipes/tiny_tools_sft.yaml`), GRPO (`tiny_tools.yaml`), and GRPO with replies
that are products of other numbers. A row per seed. It fails if more than a fifth of the samples call the tool before
GRPO, GRPO gains less than 0.30 on held-out problems, or the wrong replies let it gain 0.05 or more.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megarl.environments.calculator import Calculator, as_text, evaluate
from megarl.environments.tools import tool
from tools.make_tiny_model import make_tiny_model
from tools.make_tool_data import make_tool_data
from tools.runs import heldout_accuracies, read_metrics, train

DURATION = {"small": "minutes: three runs of one seed (not timed)", "full": "minutes: three runs a seed (not timed)"}
SMALL = {"seeds": [0]}
MAX_CALLED = 0.2
MIN_GAIN = 0.3
MAX_GAIN_WITHOUT_REPLIES = 0.05


class WrongReplies(Calculator):
    """A calculator that replies with the product of other numbers. Equal questions get equal replies."""

    @tool
    async def calculator(self, expression: str) -> str:
        """The value of an arithmetic expression."""
        generator = random.Random(expression)
        return as_text(evaluate(f"{generator.randint(100, 999)} * {generator.randint(100, 999)}"))


def check_seed(folder: Path, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Train with one seed in a folder. Returns its row."""
    make_tiny_model(folder / "model", num_layers=2, initializer_range=0.08, tool_words=True, seed=seed)
    data = make_tool_data(folder / "data", seed=seed)
    common = (f"runs_folder={folder}", f"seed={seed}", f"data.validation.heldout={data}/heldout.jsonl")
    student = (f"model.path={folder}/model", f"data.train={data}/sft.jsonl", *overrides)
    seconds = train("launch/recipes/tiny_tools_sft.yaml", *common, *student)
    grpo = (*common, f"model.path={folder}/tiny_tools_sft/hf", f"data.train={data}/train.jsonl")
    seconds += train("launch/recipes/tiny_tools.yaml", *grpo)
    wrong = ("name=wrong_replies", "rollout.environment=tools.checks.tool_calls:WrongReplies")
    train("launch/recipes/tiny_tools.yaml", *grpo, *wrong)

    steps = read_metrics(folder / "tiny_tools")
    called = next(step["tools/calculator/calls"] for step in steps if "tools/calculator/calls" in step)
    first, *_, last = heldout_accuracies(folder / "tiny_tools")
    wrong_first, *_, wrong_last = heldout_accuracies(folder / "wrong_replies")
    gain, wrong_gain = last - first, wrong_last - wrong_first
    return {
        "seed": seed,
        "calls_before": called,
        "before": first,
        "after": last,
        "wrong_before": wrong_first,
        "wrong_after": wrong_last,
        "minutes": seconds / 60,
        "met": called <= MAX_CALLED and gain >= MIN_GAIN and wrong_gain < MAX_GAIN_WITHOUT_REPLIES,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("runs/check_tools"), help="folder for the runs, new")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", help="overrides of the SFT recipe")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for seed in options.seeds:
        yield check_seed((options.out / f"seed_{seed}").resolve(), seed, options.overrides)
