"""Equality of functions given by cases: values with conditions, in any order."""

from __future__ import annotations

from collections.abc import Callable

from megarl.rewards.maths.equality.matching import match_in_any_order
from megarl.rewards.maths.formulas.nodes import OTHERWISE, Node

_COMPLEMENTS = {"<": ">=", ">=": "<", ">": "<=", "<=": ">", "=": "!=", "!=": "="}
"""Sign of the relation that holds exactly if the one with the key does not."""


def same_cases(gold: Node, prediction: Node, is_same_row: Callable[[Node, Node], bool]) -> bool:
    """Return whether two nodes of `cases` with equally many rows have equal values under equal conditions.

    Of two cases, `otherwise` is the opposite of the other condition.
    """
    return match_in_any_order(_with_written_complement(gold), _with_written_complement(prediction), is_same_row)


def _with_written_complement(cases: Node) -> tuple[Node, ...]:
    """Return the rows of cases. Of two rows, `otherwise` becomes the opposite condition: `x <= 0` after `x > 0`."""
    rows = cases.parts
    if len(rows) != 2 or any(len(row.parts) != 2 for row in rows):
        return rows
    for row, other_row in (rows, rows[::-1]):
        condition = other_row.parts[1]
        if row.parts[1] != OTHERWISE or condition.kind != "relation" or len(condition.value) != 1:
            continue
        if (sign := _COMPLEMENTS.get(condition.value[0])) is not None:
            return other_row, Node("row", (row.parts[0], Node("relation", condition.parts, (sign,))))
    return rows
