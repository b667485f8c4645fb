"""Start the runs that checks are made of, and read what a run wrote into its folder."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import megarl

ROOT = Path(__file__).resolve().parents[1]
DIGITS_REWARD = '''"""Reward for the share of digits in an answer. It differs between the answers of a random model."""

from megarl.types import Reward


def digits(completion_text: str, answer: str, *, correct_score: float) -> Reward:
    share = sum(character.isdigit() for character in completion_text) / max(1, len(completion_text))
    return Reward(score=share, format_valid=True, answer_correct=share > 0.5)
'''
"""Content of a file for `reward.functions=[FILE:digits]`."""
program: Sequence[str] = (sys.executable, "-m", "megarl")
"""Start of megarl's command line. Tests replace it by one that starts faster."""


def run_python(*arguments: str | Path, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run this interpreter in a folder and capture its output."""
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=folder, capture_output=True, text=True)


def run_megarl(*arguments: str | Path, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command of megarl in a folder and capture its output."""
    return subprocess.run([*program, *map(str, arguments)], cwd=folder, capture_output=True, text=True)


def train(recipe: str | Path, *overrides: str, folder: Path = ROOT) -> float:
    """Run `megarl train` in a folder. Returns the seconds, with start and export.

    A relative recipe is one of the repository or of the folder. Raises SystemExit with the end of the output if the
    run fails.
    """
    path = ROOT / recipe if (ROOT / recipe).is_file() else recipe
    started = time.perf_counter()
    done = run_megarl("train", path, *overrides, folder=folder)
    if done.returncode:
        raise SystemExit(
            f"megarl train {recipe} {' '.join(overrides)} ended with {done.returncode}:\n{output_end(done)}"
        )
    return time.perf_counter() - started


def output_end(done: subprocess.CompletedProcess[str]) -> str:
    """Return the end of a program's output and of its errors."""
    return done.stdout[-2000:] + done.stderr[-4000:]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_metrics(run_folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run, one record a step, each without the metrics that its step lacks."""
    rows = megarl.load_run(run_folder).metrics().to_pylist()
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def heldout_accuracies(run_folder: Path) -> list[float]:
    """Return the accuracy on the held-out problems at each evaluation of a run, in order."""
    name = "val/heldout/accuracy"
    return [step[name] for step in read_metrics(run_folder) if name in step]


def make_environment(
    folder: Path, packages: Sequence[str], *, shares_packages: bool = False, interpreter: str = sys.executable
) -> Path:
    """Return the Python of a virtual environment with these packages, made unless the folder has one.

    shares_packages: packages of this interpreter are found there too, and not installed again.
    """
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([interpreter, "-m", "venv", folder], check=True)
        if shares_packages:
            version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
            path_file = folder / "lib" / version / "site-packages/shared.pth"
            path_file.write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        # Not uv: it does not see packages that a .pth file adds.
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python
