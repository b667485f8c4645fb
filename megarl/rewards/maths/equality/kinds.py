"""Kinds of parsed answers: equations, conditions, alternatives, sets of numbers."""

from __future__ import annotations

from megarl.rewards.maths.equality.number_sets import INEQUALITIES
from megarl.rewards.maths.formulas.nodes import EMPTY_SET, Node, symbol


def is_equation(node: Node) -> bool:
    return node.kind == "relation" and set(node.value) == {"="}


def is_arithmetic(node: Node) -> bool:
    return set(node.value) <= INEQUALITIES | {"="}


def is_alternative(node: Node) -> bool:
    return node.kind == "list" and node.value == "or"


def has_statements(node: Node) -> bool:
    """Return whether a list has conditions, choices or propositions instead of values."""
    if node.kind != "list":
        return False
    is_propositions = all(part.kind in ("symbol", "list") or part.value == "not" for part in node.parts)
    return is_propositions or any(part.kind in ("relation", "list") or is_capital_letter(part) for part in node.parts)


def is_condition(node: Node) -> bool:
    """Return whether a list consists of relations that are not all equations."""
    if node.kind != "list" or not all(part.kind == "relation" or is_condition(part) for part in node.parts):
        return False
    return not all(is_equation(part) for part in node.parts)


def is_number_set(node: Node) -> bool:
    return node.kind in ("setop", "builder") or node in (symbol("mathbbR"), EMPTY_SET)


def is_capital_letter(node: Node) -> bool:
    return node.kind == "symbol" and len(node.value) == 1 and node.value.isupper()
