"""Make small programming problems with tests: numbers in, a number out.

    megarl make code --out runs/tiny_code_input/data

Writes `train.jsonl` and `heldout.jsonl`, a line {"messages": ..., "test_cases": {"inputs": [...], "outputs": [...]}}
each. No problem is in both. With `--form calls` a function `solve` is called with the numbers.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

TASKS: dict[str, Callable[[list[int], int], int]] = {
    "the sum of all numbers plus {}": lambda numbers, k: sum(numbers) + k,
    "the largest number plus {}": lambda numbers, k: max(numbers) + k,
    "the smallest number plus {}": lambda numbers, k: min(numbers) + k,
    "{} times the first number": lambda numbers, k: k * numbers[0],
}
NUM_TESTS = 5


def problem(task: str, constant: int, form: str, generator: random.Random) -> dict[str, Any]:
    """Return a record: the task with its constant, and tests with random numbers."""
    number_lists = [[generator.randint(-50, 50) for _ in range(generator.randint(1, 6))] for _ in range(NUM_TESTS)]
    outputs = [TASKS[task](numbers, constant) for numbers in number_lists]
    result_text = task.format(constant)
    if form == "calls":
        asked = f"Write a function solve(numbers) that returns {result_text}."
        tests = {"fn_name": "solve", "inputs": [[numbers] for numbers in number_lists], "outputs": outputs}
    else:
        asked = f"Read numbers from one line. Print {result_text}."
        tests = {
            "inputs": [" ".join(map(str, numbers)) for numbers in number_lists],
            "outputs": list(map(str, outputs)),
        }
    return {"messages": {"role": "user", "content": asked}, "test_cases": tests}


def make_code_data(folder: Path, num_train: int, num_heldout: int, form: str, seed: int) -> None:
    """Write both files. Raises ValueError if there are too few different problems."""
    problems = [(task, constant) for task in TASKS for constant in range(2, 100)]
    if num_train + num_heldout > len(problems):
        raise ValueError(f"there are {len(problems)} problems; {num_train} and {num_heldout} are more")
    generator = random.Random(seed)
    generator.shuffle(problems)
    folder.mkdir(parents=True, exist_ok=True)
    for name, selected in {"train": problems[:num_train], "heldout": problems[num_train:][:num_heldout]}.items():
        lines = [json.dumps(problem(task, constant, form, generator)) for task, constant in selected]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--train", type=int, default=256, help="problems for training")
    parser.add_argument("--heldout", type=int, default=32, help="problems for validation")
    parser.add_argument("--form", choices=["stdin", "calls"], default="stdin", help="how programs get the numbers")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make_code_data(options.out, options.train, options.heldout, options.form, options.seed)
    for path in sorted(options.out.glob("*.jsonl")):
        print(f"wrote {path}: {len(path.read_bytes().splitlines())} lines, first: {path.open().readline().strip()}")


if __name__ == "__main__":
    main()
