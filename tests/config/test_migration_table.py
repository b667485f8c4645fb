"""Each row of launch/recipes/MIGRATION.md is a recipe, and agrees with what a recipe with that option is told."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from megarl.config import Recipe
from megarl.config.migration import counterpart
from megarl.config.recipe import load
from megarl.preflight import learning, sizes
from megarl.preflight.keywords import keywords

TABLE = Path(__file__).resolve().parents[2] / "launch/recipes/MIGRATION.md"

BASE = """
name: base
loop: rl
model: {path: m}
data: {train: t.jsonl}
trainer: {max_tokens_per_microbatch: 65536}
train: {prompts_per_step: 64}
rollout: {sampling: {max_new_tokens: 1024}}
"""


class Row(NamedTuple):
    program: str
    option: str
    overrides: list[str]
    difference: str


def rows() -> list[Row]:
    found, program = [], ""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            program = line[3:].partition(":")[0]
        elif match := re.fullmatch(r"\| `([^`]+)` \| (?:`([^`]+)`|—) \| (.*?) ?\|", line):
            option, overrides, difference = match.groups()
            found.append(Row(program, option, (overrides or "").split(), difference))
    return found


ROWS = rows()
PROGRAMS = ["ColossalRL", "ColossalChat", "RL2", "verl", "slime", "TRL", "NeMo-RL", "AReaL", "prime-rl"]


def test_the_table_is_read_in_full() -> None:
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert len(lines) == len(ROWS) > 200
    assert {row.program for row in ROWS} == set(PROGRAMS)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], Recipe]:
    path = tmp_path_factory.mktemp("migration") / "base.yaml"
    path.write_text(BASE)
    return lambda overrides: load(path, overrides)


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_row_is_a_recipe(recipe: Callable[[list[str]], Recipe], program: str) -> None:
    """Fields exist, have these values' types and an effect, and go together; models and data are not looked at."""
    wrong: dict[str, object] = {}
    for row in (row for row in ROWS if row.program == program):
        if not row.overrides:
            assert row.difference, f"{row.option} has no field and no reason"
            continue
        try:
            made = recipe(row.overrides)
        except Exception as error:
            wrong[row.option] = str(error)
            continue
        layout = sizes.layout_of(made)
        faults = [*sizes.ranks(made), *sizes.batches(made, layout.dp), *sizes.lengths(made)]
        faults += [*learning.optimizers(made), *learning.algorithm(made), *learning.sampling(made)]
        faults += [*learning.stragglers(made), *learning.staleness(made), *learning.rewards(made), *keywords(made)]
        if faults:
            wrong[row.option] = faults
    assert wrong == {}


OTHERWISE = {
    "ColossalChat --max_length",
    "ColossalChat --num_episodes",
    *(f"TRL beta {beta}" for beta in ("0.0", "0.5", "1.0")),
    "NeMo-RL teacher.megatron_cfg.tensor_model_parallel_size",
}
"""Options that mean something else there than in other programs."""


def test_what_a_recipe_is_told_agrees_with_the_table() -> None:
    """A field that the hint of an unknown key names is one of the row's."""
    wrong = {}
    for row in ROWS:
        name = row.option.split()[0].lstrip("-")
        if (told := counterpart(name)) is None or not row.overrides:
            continue
        given = {override.partition("=")[0] for override in row.overrides}
        is_exempt = f"{row.program} {row.option}" in OTHERWISE
        if (
            told.fields
            and not is_exempt
            and not any(g == f or g.startswith(f"{f}.") for g in given for f in told.fields)
        ):
            wrong[f"{row.program} {row.option}"] = (told.fields, given)
    assert wrong == {}
