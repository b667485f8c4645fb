"""An agent written with another library, pydantic-ai, trains unchanged against the endpoint of a run.

Makes a virtual environment with the library, a tiny student that calls a calculator now and then (SFT), and trains it
for two steps of GRPO with a program whose loop of model and tools is the library's own. A row per step; it fails if a
program ended with an error or a sampled token was not trained. The last row fails if no tool was called.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.make_tiny_model import make_tiny_model
from tools.make_tool_data import make_tool_data
from tools.runs import make_environment, read_metrics, train

DURATION = {"full": "minutes: SFT of 150 steps, two steps of GRPO, and a download (not timed)"}
SMALL: dict[str, Any] = {}
LIBRARY = "pydantic-ai-slim[openai]"
STEPS = 2
PROGRAM = '''
import ast
import json
import sys

from pydantic_ai import Agent
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.usage import UsageLimits

task = json.loads(sys.stdin.readline())
agent = Agent("openai-chat:policy", retries=1)


@agent.tool_plain
def calculator(expression: str) -> str:
    """The value of an arithmetic expression."""
    left, sign, right = expression.partition("*")
    try:
        return str(int(left) * int(right))
    except ValueError as error:
        return f"error: {error}"


said = ""
try:
    said = agent.run_sync(task["messages"][-1]["content"], usage_limits=UsageLimits(request_limit=4)).output
except (UnexpectedModelBehavior, UsageLimitExceeded) as error:
    print(error, file=sys.stderr)  # the policy's doing: no reward
print(json.dumps({"reward": float(task["answer"] in said)}))
'''


def check(folder: Path) -> Iterator[dict[str, Any]]:
    """Train in an empty folder."""
    program = folder / "agent.py"
    program.write_text(PROGRAM, encoding="utf-8")
    python = make_environment(folder / "venv", [LIBRARY])
    make_tiny_model(folder / "model", num_layers=2, initializer_range=0.08, tool_words=True)
    data = make_tool_data(folder / "data")
    common = (f"runs_folder={folder}", f"data.validation.heldout={data}/heldout.jsonl")
    student = (f"model.path={folder}/model", f"data.train={data}/sft.jsonl")
    train("launch/recipes/tiny_tools_sft.yaml", *common, *student)
    train(
        "launch/recipes/tiny_tools.yaml", *common, "name=agent", f"model.path={folder}/tiny_tools_sft/hf",
        f"data.train={data}/train.jsonl", f"train.steps={STEPS}", "train.prompts_per_step=8",
        "train.samples_per_prompt=4", "rollout.environment=command", f"rollout.agent.command=[{python}, {program}]",
        "rollout.agent.max_processes=4", "evaluation.every_steps=0", "evaluation.max_problems=8",
        "data.max_prompt_tokens=512",
    )  # fmt: skip
    steps = read_metrics(folder / "agent")
    lost = ("environment/abandoned_calls", "environment/untrained_tokens")
    for step in steps:
        faults = {name: value for name, value in step.items() if ("/errors/" in name or name in lost) and value}
        yield {
            "step": step["step"],
            "model_calls": step.get("environment/model_calls", 0.0),
            "logprob_gap": step.get("logprob_gap/max", 0.0),
            "faults": faults or "none",
            "met": not faults,
        }
    calls = max(step.get("environment/model_calls", 0.0) for step in steps)
    # A program that calls the model once has called no tool.
    yield {"step": "all", "model_calls": calls, "met": calls > 1}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="folder for all of it, new; default: one that is removed")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.out or Path(temporary) / "check").absolute()
        folder.mkdir(parents=True)
        yield from check(folder)
