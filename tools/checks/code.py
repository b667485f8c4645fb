"""The code recipe runs end to end: programs in answers are run in the sandbox, and their tests are counted.

Makes a model with random weights and problems, trains two steps (`launch/recipes/tiny_code.yaml`), then two with the
Python tool. A random model does not write programs. So the first run has a second reward besides `code`, which solves
each problem and lets the same sandbox run that. A row per step; it fails if a metric is missing or that program does
not pass.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.make_code_data import make_code_data
from tools.make_tiny_model import make_tiny_model
from tools.runs import read_metrics, train

DURATION = {"full": "55 s"}
SMALL: dict[str, Any] = {}
SOLVED = '''"""A reward that scores a right program for the problem in place of the completion."""

from megarl.rewards.functions.code import code

FIRST = "numbers = list(map(int, input().split()))"
RESULTS = {"sum": "sum(numbers) + k", "largest": "max(numbers) + k", "smallest": "min(numbers) + k",
           "times": "k * numbers[0]"}


def solved(answer, record, sandbox):
    words = record["messages"]["content"].rstrip(".").split()
    k = next(int(word) for word in reversed(words) if word.isdigit())
    [result] = [text for name, text in RESULTS.items() if name in words]
    program = f"```python\\n{FIRST}\\nk = {k}\\nprint({result})\\n```"
    return code(program, answer, record, sandbox)
'''
SHARES = ("passed", "wrong", "runtime_errors", "timeouts", "unrun")


def scores_programs(step: dict[str, Any]) -> bool:
    """Return whether right programs pass, all outcomes add up, and the model's own answers were scored."""
    total = sum(step.get(f"reward/solved/{share}", 0.0) for share in SHARES)
    right = step.get("reward/solved/mean") == 1.0 and abs(total - 1) <= 1e-9
    return right and "reward/code/mean" in step and not step["reward/errors"] and not step["reward/timeouts"]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--work", type=Path, help="folder for model, data and runs")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="megarl_check_code_") as name:
        work = (options.work or Path(name)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        (work / "solved.py").write_text(SOLVED, encoding="utf-8")
        make_tiny_model(work / "model", num_layers=2, tool_words=True)
        make_code_data(work / "data", 256, 4, "stdin", seed=0)
        common = (
            "launch/recipes/tiny_code.yaml", "--restart", f"runs_folder={work}", f"model.path={work}/model",
            f"data.train={work}/data/train.jsonl", f"data.validation.heldout={work}/data/heldout.jsonl",
        )  # fmt: skip
        rewards = f"{{name: code, kwargs: {{score: fraction}}}}, {{name: {work}/solved.py:solved, weight: 0}}"
        train(*common, f"reward.functions=[{rewards}]")
        train(*common, "name=tiny_code_tool", "rollout.environment=python", "rollout.max_turns=3")
        for run_name in ("tiny_code", "tiny_code_tool"):
            steps = [step for step in read_metrics(work / run_name) if "reward/mean" in step]
            for step in steps:
                has_tool = run_name == "tiny_code_tool"
                met = "tools/python/calls" in step if has_tool else scores_programs(step)
                yield {
                    "run": run_name,
                    "step": step["step"],
                    "solved": step.get("reward/solved/mean", "-"),
                    "code": step.get("reward/code/mean", "-"),
                    "tool_calls": step.get("tools/python/calls", "-"),
                    "met": met and len(steps) == 2,
                }
