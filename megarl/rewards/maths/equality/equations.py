"""Equations and chains of inequalities as differences."""

from __future__ import annotations

from typing import NamedTuple

from megarl.rewards.maths.equality.values import same_value
from megarl.rewards.maths.formulas.nodes import Node, join_operands, negative, number, replace_node

_FLIPPED = {">": "<", ">=": "<="}


class Step(NamedTuple):
    """One comparison in a chain of inequalities: `difference` compared with zero by `sign`."""

    difference: Node
    sign: str


def list_steps(node: Node) -> list[Step]:
    """Return a chain of relations as pairs (left - right, sign), with > turned into <: `a > b` becomes (b - a, <)."""
    steps = []
    for left, sign, right in zip(node.parts, node.value, node.parts[1:], strict=False):
        if sign in (">", ">="):
            left, right, sign = right, left, _FLIPPED[sign]
        steps.append(Step(join_operands("sum", [left, negative(right)]), sign))
    # A descending chain is reversed, so that equal chains have equal order.
    is_descending = next((sign in _FLIPPED for sign in node.value if sign not in ("=", "!=")), False)
    return steps[::-1] if is_descending else steps


def determines(left: Node, right: Node, difference: Node) -> bool:
    """Return whether `difference = 0` is linear in the symbol `left` and has the only solution `left = right`."""
    if left.kind != "symbol" or left.value in right.symbols() or left.value not in difference.symbols():
        return False
    zero = number(0)
    if not same_value(replace_node(difference, left, right), zero):
        return False
    # An equal, non-zero slope between three points means linear.
    values = [replace_node(difference, left, number(point)) for point in (1, 2, 3)]
    slope = join_operands("sum", [values[1], negative(values[0])])
    return same_value(slope, join_operands("sum", [values[2], negative(values[1])])) and not same_value(slope, zero)
