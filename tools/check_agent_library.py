"""An agent written with another library trains: pydantic-ai, unchanged, against the endpoint of a run.

    python tools/check_agent_library.py [--out FOLDER]

Makes a virtual environment with the library, a tiny student that calls a calculator now and then (SFT), and trains it
for two steps of GRPO with a program whose loop of model and tools is the library's own. Prints what the run saw, and
fails where a program ended with an error, no tool was called, or a sampled token was not trained.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

LIBRARY = "pydantic-ai-slim[openai]"
STEPS = 2
ROOT = Path(__file__).resolve().parents[1]
PROGRAM = '''
import ast
import json
import sys

from pydantic_ai import Agent
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.usage import UsageLimits

told = json.loads(sys.stdin.readline())
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
    said = agent.run_sync(told["messages"][-1]["content"], usage_limits=UsageLimits(request_limit=4)).output
except (UnexpectedModelBehavior, UsageLimitExceeded) as error:
    print(error, file=sys.stderr)  # the policy's doing: no reward
print(json.dumps({"reward": float(told["answer"] in said)}))
'''


def run(*command: str) -> None:
    """Run a program from the repository's root. Raises SystemExit with its output where it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def check(folder: Path) -> list[str]:
    """Train in a folder, print each step. Returns what fell short."""
    python, program = folder / "venv/bin/python", folder / "agent.py"
    program.write_text(PROGRAM, encoding="utf-8")
    run("uv", "venv", "--quiet", "--python", f"{sys.version_info[0]}.{sys.version_info[1]}", str(folder / "venv"))
    run("uv", "pip", "install", "--quiet", "--python", str(python), LIBRARY)
    data, model = folder / "data", folder / "model"
    run(
        sys.executable, "tools/make_tiny_model.py", "--out", str(model), "--num-layers", "2", "--initializer-range",
        "0.08", "--tool-words",
    )  # fmt: skip
    run(sys.executable, "tools/make_tool_data.py", "--out", str(data))
    train = (sys.executable, "-m", "megarl", "train")
    common = [f"runs_folder={folder}", f"data.validation.heldout={data}/heldout.jsonl"]
    sft = [f"model.path={model}", f"data.train={data}/sft.jsonl"]
    run(*train, "launch/recipes/tiny_tools_sft.yaml", *common, *sft)
    own = [
        "name=agent", f"model.path={folder}/tiny_tools_sft/hf", f"data.train={data}/train.jsonl",
        f"train.steps={STEPS}", "train.prompts_per_step=8", "train.samples_per_prompt=4", "rollout.environment=command",
        f"rollout.agent.command=[{python}, {program}]", "rollout.agent.max_processes=4", "evaluation.every_steps=0",
        "evaluation.max_problems=8", "data.max_prompt_tokens=512",
    ]  # fmt: skip
    run(*train, "launch/recipes/tiny_tools.yaml", *common, *own)
    wrong = []
    steps = [json.loads(line) for line in (folder / "agent/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for step in steps:
        shown = {
            name: value
            for name, value in sorted(step.items())
            if name.startswith(("environment/", "rollout/errors", "rollout/segments", "rollout/forks", "logprob_gap/"))
        }
        print(json.dumps({"step": step["step"], **shown}), flush=True)
        dropped = ("environment/abandoned_calls", "environment/untrained_tokens")
        faults = {name: value for name, value in shown.items() if ("/errors/" in name or name in dropped) and value}
        wrong += [f"step {step['step']}: {name} = {value:g}" for name, value in faults.items()]
    if not any(step.get("environment/model_calls", 0) > 1 for step in steps):
        wrong.append("no program called the model twice: no tool was called")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for all of it, new; default: one that is removed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.out or Path(temporary) / "check").absolute()
        folder.mkdir(parents=True)
        if wrong := check(folder):
            sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
