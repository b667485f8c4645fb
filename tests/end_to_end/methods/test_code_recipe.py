"""The code recipe runs end to end: programs in answers are run in the sandbox, and their tests are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.make_code_data import make_code_data
from tools.make_tiny_model import make_tiny_model
from tools.runs import read_metrics, train

pytestmark = [pytest.mark.end_to_end, pytest.mark.long]

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
OUTCOMES = ("passed", "wrong", "runtime_errors", "timeouts", "unrun")


def test_programs_are_run_with_and_without_the_python_tool(tmp_path: Path) -> None:
    """A random model does not write programs, so a second reward solves each problem in the same sandbox."""
    (tmp_path / "solved.py").write_text(SOLVED, encoding="utf-8")
    make_tiny_model(tmp_path / "model", num_layers=2, tool_words=True)
    make_code_data(tmp_path / "data", 256, 4, "stdin", seed=0)
    common = (
        "launch/recipes/tiny_code.yaml", "--restart", f"runs_folder={tmp_path}", f"model.path={tmp_path}/model",
        f"data.train={tmp_path}/data/train.jsonl", f"data.validation.heldout={tmp_path}/data/heldout.jsonl",
    )  # fmt: skip
    rewards = f"{{name: code, kwargs: {{score: fraction}}}}, {{name: {tmp_path}/solved.py:solved, weight: 0}}"
    train(*common, f"reward.functions=[{rewards}]")
    steps = [step for step in read_metrics(tmp_path / "tiny_code") if "reward/mean" in step]
    assert len(steps) == 2
    for step in steps:
        assert step["reward/solved/mean"] == 1.0 and "reward/code/mean" in step
        assert sum(step.get(f"reward/solved/{outcome}", 0.0) for outcome in OUTCOMES) == pytest.approx(1, abs=1e-9)
        assert not step["reward/errors"] and not step["reward/timeouts"]

    train(*common, "name=tiny_code_tool", "rollout.environment=python", "rollout.max_turns=3")
    steps = [step for step in read_metrics(tmp_path / "tiny_code_tool") if "reward/mean" in step]
    assert len(steps) == 2 and all("tools/python/calls" in step for step in steps)
