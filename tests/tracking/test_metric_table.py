"""The table of all metrics against the code that makes them; runs are held against it in end_to_end."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache

import pytest

from megarl.tracking.metric_table import PACKAGE, TABLE, Row, find, rows


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
    found = find(name)
    assert (found and found.name) == row
