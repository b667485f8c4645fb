"""The table of all metrics against the code that makes them; runs are held against it in end_to_end."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from megarl.config.schema import field_at
from megarl.tracking.metric_rows import PER_ATTEMPT, MetricRow
from megarl.tracking.metric_table import PACKAGE, TABLE, Row, declared_rows, describe_row, find_row, rows


@cache
def written_texts(module: str) -> tuple[str, ...]:
    """The strings in a module's code, docstrings and its table left out."""
    path = PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == TABLE)
    ]
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return tuple(
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose
    )


@cache
def all_declared_rows() -> tuple[MetricRow, ...]:
    """The rows of all modules, as they are declared."""
    return tuple(row for path in PACKAGE.rglob("*.py") for row in declared_rows(path))


def is_made(row: Row) -> bool:
    """Whether the last part of the name that is no placeholder is in a string of the module's code."""
    literal = [part for part in re.split(r"[A-Z]+|/", row.name) if part]
    pieces = written_texts(row.module)
    if f"/{literal[-1]}" == row.name[-len(literal[-1]) - 1 :]:
        return any(piece.split("/")[-1] == literal[-1] for piece in pieces)
    return any(literal[-1] in piece for piece in pieces)


def test_no_row_is_dead() -> None:
    assert len(rows()) > 100
    assert [row.name for row in rows() if not is_made(row)] == []
    assert not is_made(Row("rollout/turns/median", "tokens", "nobody makes it", "megarl.rollout.step.step_metrics"))
    assert not is_made(Row("gone/NAME", "tokens", "nobody makes it", "megarl.rollout.step.step_metrics"))


def test_a_name_has_one_row_with_a_unit_and_a_meaning() -> None:
    assert [name for name, count in Counter(row.name for row in rows()).items() if count > 1] == []
    for row in rows():
        assert row.unit and len(row.meaning) > 10, row
        for unit in ("seconds", "bytes", "tokens", "gib"):
            if re.search(rf"_{unit}(/\w+)?$", row.name):
                assert row.unit.lower() == unit, row


def test_a_family_has_a_row_for_each_member() -> None:
    row = MetricRow("rollout/turns/{mean,max}", "completions", "completions", PER_ATTEMPT, condition="a.b")
    assert [*describe_row(row)] == [
        ("rollout/turns/mean", "completions", "with a.b: completions, mean over attempts, mean"),
        ("rollout/turns/max", "completions", "with a.b: completions, mean over attempts, largest"),
    ]


def test_a_condition_names_a_recipe_field_and_its_value() -> None:
    conditions = {row.condition for row in all_declared_rows()} - {""}
    assert len(conditions) > 10
    for condition in conditions:
        name, _, value = condition.partition("=")

        field = field_at(name.removesuffix(".speculative_config"))
        assert field is not None, condition
        # A field with values of the user's own has another type.
        assert "Literal" not in str(field.annotation) or not value or f"'{value}'" in str(field.annotation), condition


@pytest.mark.parametrize(
    "source",
    [
        'METRICS = {"a/b": ("1", "a number")}',
        'METRICS = (MetricRow("a/b", "1", NOT_A_CONSTANT),)',
        'METRICS = (Row("a/b", "1", "a number"),)',
        'METRICS = (MetricRow("a/b", "1", f"a {number}"),)',
        'METRICS = (MetricRow("a/b"),)',
    ],
)
def test_a_table_that_cannot_be_read_is_an_error(tmp_path: Path, source: str) -> None:
    (tmp_path / "made.py").write_text(f"\n{source}\n")
    with pytest.raises((ValueError, AttributeError, TypeError)):
        declared_rows(tmp_path / "made.py")


def test_no_meaning_is_written_twice() -> None:
    meanings = Counter(row.meaning for row in all_declared_rows())
    assert [meaning for meaning, count in meanings.items() if count > 1] == []


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("time/rollout_seconds", "time/PHASE_seconds"),
        ("time/reshard_pack_seconds", "time/reshard_STAGE_seconds"),
        ("reward/mean", "reward/mean"),
        ("reward/boxed/mean", "reward/NAME/mean"),
        ("reward/mine/a/b", "reward/NAME/OWN"),
        ("val/heldout/accuracy", "val/SET/accuracy"),
        ("val/heldout/reward/boxed/mean", "reward/NAME/mean"),
        ("critic/grad_norm", "critic/NAME"),
        ("environment/sums/share", "environment/SOURCE/share"),
        ("environment/sums/turns/mean", "rollout/turns/mean"),
        ("environment/sums/reward/boxed/std", "reward/NAME/std"),
        ("environment/games/guesses", "environment/guesses"),
        ("environment/of_mine", "environment/OWN"),
        ("train/of_my_own_loss", None),
        ("val/heldout/of_nobody", None),
        ("rewards/mean", None),
    ],
)
def test_a_logged_name_finds_its_row(name: str, row: str | None) -> None:
    found = find_row(name)
    assert (found and found.name) == row
