"""Every row of the guide to equal answers holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import megarl.rewards.maths
from megarl.rewards.maths.agreement import agreement

GUIDE = Path(megarl.rewards.maths.__file__).with_name("README.md")


def rows() -> list[tuple[str, str, list[str], list[str]]]:
    """Rows of the guide's tables: rule, gold answer, equal answers, different answers."""
    cells = [line.strip("| \n").split(" | ") for line in GUIDE.read_text(encoding="utf-8").splitlines() if "|" in line]
    assert all(len(row) == 4 or set("".join(row)) <= set("-|") for row in cells), "a row has not four cells"
    examples = [row for row in cells if len(row) == 4 and row[0] != "rule"]
    return [(rule, *golds(gold), quoted(equal), quoted(different)) for rule, gold, equal, different in examples]


def golds(cell: str) -> list[str]:
    (gold,) = quoted(cell)
    return [gold]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_guide_has_rules() -> None:
    assert len(rows()) > 40
    assert all(equal and different for _, _, equal, different in rows())


@pytest.mark.parametrize(("rule", "gold", "equal", "different"), rows(), ids=[row[0] for row in rows()])
def test_the_examples_of_a_rule_hold(rule: str, gold: str, equal: list[str], different: list[str]) -> None:
    assert [answer for answer in equal if agreement(answer, gold) != 1.0] == []
    assert [answer for answer in different if agreement(answer, gold) != 0.0] == []
