"""The code recipe on a tiny model, end to end: programs in the answers are run in the sandbox, and their tests counted.

    python tools/check_code.py --work /tmp/check_code

Makes a model with random weights and problems, trains two steps (`launch/recipes/tiny_code.yaml`), then two with the
Python tool. What a random model writes are no programs; so the first run has a reward of its own beside `code`, which
solves each problem and lets the same sandbox run that. Fails where a metric is missing or that program does not pass.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOLVED = '''"""A reward that scores a right program for the problem in place of the completion."""

from megarl.rewards.code import code

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


def run(*command: str) -> None:
    """Run a program from the repository's root. Raises where it fails."""
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def metrics_of(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [found for line in lines if "reward/mean" in (found := json.loads(line))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=None, help="folder for model, data and runs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megarl_check_code_") as name:
        work = given.work or Path(name)
        work.mkdir(parents=True, exist_ok=True)
        (work / "solved.py").write_text(SOLVED, encoding="utf-8")
        run("tools/make_tiny_model.py", "--out", str(work / "model"), "--num-layers", "2", "--tool-words")
        run("tools/make_code_data.py", "--out", str(work / "data"), "--heldout", "4")
        common = [
            f"runs_folder={work}", f"model.path={work}/model", f"data.train={work}/data/train.jsonl",
            f"data.validation.heldout={work}/data/heldout.jsonl",
        ]  # fmt: skip
        train = ["-m", "megarl", "train", "launch/recipes/tiny_code.yaml", "--restart", *common]
        own = "{name: code, kwargs: {score: fraction}}, {name: " + str(work / "solved.py") + ":solved, weight: 0}"
        run(*train, f"reward.functions=[{own}]")
        run(*train, "name=tiny_code_tool", "rollout.environment=python", "rollout.max_turns=3")
        found = {name: metrics_of(work / name) for name in ("tiny_code", "tiny_code_tool")}
    failed = []
    for name, steps in found.items():
        if len(steps) != 2:
            failed.append(f"{name}: {len(steps)} steps with rewards, not 2")
        for step in steps:
            shown = {key: round(value, 4) for key, value in step.items() if key.startswith(("reward/", "tools/"))}
            print(name, json.dumps(shown))
    for step in found["tiny_code"]:
        shares = sum(step.get(f"reward/solved/{share}", 0.0) for share in SHARES)
        if step.get("reward/solved/mean") != 1.0 or abs(shares - 1) > 1e-9:
            failed.append(f"right programs do not pass: {step}")
        if "reward/code/mean" not in step or step["reward/errors"] or step["reward/timeouts"]:
            failed.append(f"completions are not scored: {step}")
    if any("tools/python/calls" not in step for step in found["tiny_code_tool"]):
        failed.append("the tool is not counted")
    print("\n".join(failed) or "the code recipe runs end to end")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
