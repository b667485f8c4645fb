"""Problems of `make_code_data.py` and the recipe that they are for."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config.recipe import load
from megarl.datasets.reward_trials import check_rewards
from megarl.preflight import check
from megarl.rewards.functions.code import code
from megarl.sandbox.sandbox import Sandbox, SandboxSettings
from megarl.types import ConfigError
from tools.make_code_data import make_code_data

ROOT = Path(__file__).resolve().parents[2]


def records(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("form", ["stdin", "calls"])
def test_problems_can_be_solved(tmp_path: Path, form: str) -> None:
    make_code_data(tmp_path, 40, 8, form, seed=7)
    train, heldout = records(tmp_path / "train.jsonl"), records(tmp_path / "heldout.jsonl")
    asked = [record["messages"]["content"] for record in (*train, *heldout)]
    assert len(train) == 40 and len(heldout) == 8 and len(set(asked)) == 48
    sums = next(record for record in train if "the sum of all numbers" in record["messages"]["content"])
    constant = sums["messages"]["content"].rstrip(".").split()[-1]
    function = f"def solve(numbers): return sum(numbers) + {constant}"
    program = function if form == "calls" else f"print(sum(map(int, input().split())) + {constant})"
    with contextlib.closing(Sandbox(SandboxSettings(packages=()))) as sandbox:
        assert code(f"```python\n{program}\n```", sums["test_cases"], sums, sandbox).score == 1.0


def test_the_recipe_is_ready(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    make_code_data(tmp_path, 16, 4, "stdin", seed=7)
    own = [
        f"model.path={tiny_model()}", f"data.train={tmp_path}/train.jsonl", f"runs_folder={tmp_path}",
        f"data.validation.heldout={tmp_path}/heldout.jsonl",
    ]  # fmt: skip
    recipe = load(ROOT / "launch/recipes/tiny_code.yaml", own)
    check(recipe)
    check_rewards(recipe)
    with pytest.raises(ConfigError, match=r"sandbox\.packages: 'nowhere'"):
        check_rewards(load(ROOT / "launch/recipes/tiny_code.yaml", [*own, "sandbox.packages=[nowhere]"]))
    with pytest.raises(ConfigError, match=r"sandbox\.memory_mib"):
        load(ROOT / "launch/recipes/tiny_code.yaml", [*own, "reward.functions=[boxed]", "sandbox.memory_mib=100"])
