"""The command that trains, as a process of its own, and its input files."""

from __future__ import annotations

from pathlib import Path

from tools.make_dataset import make_dataset
from tools.runs import DIGITS_REWARD, run_megarl


def train(folder: Path, *arguments: str) -> str:
    """Run `megarl train ARGUMENTS` in a folder to its good end. Returns what it printed on standard output."""
    done = run_megarl("train", *arguments, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write_inputs(folder: Path, recipe: str, *, num_problems: int) -> None:
    """Write recipe.yaml with problems in data/ and the reward function `digits:digits`.

    A model with random weights solves no problem, but its answers have different shares of digits.
    """
    make_dataset(folder / "data", sft=8, train=num_problems, heldout=8)
    (folder / "digits.py").write_text(DIGITS_REWARD)
    (folder / "recipe.yaml").write_text(recipe)
