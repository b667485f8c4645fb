r"""Expansion of \pm and \mp into the formulas that they mean."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import product

from megarl.rewards.maths.equality.exact import exact
from megarl.rewards.maths.formulas.nodes import Node, negative

MAX_SIGNS = 4
r"""Maximum number of \pm and \mp to expand. Each doubles the number of values."""


def expand_signs(node: Node) -> Node:
    r"""Return a formula with \pm and \mp as the list of formulas that it means, without repeated numbers.

    Every \pm is independent: `\pm1\pm i` means four numbers. With \mp all signs change together. In a relation, the
    n-th signs of both sides change together. Formulas with more than MAX_SIGNS signs are returned unchanged.
    """
    if node.kind == "list":
        return Node("list", tuple(formula for part in node.parts for formula in _expand_item(part)), node.value)
    if node.kind == "set":
        return Node("set", tuple(formula for part in node.parts for formula in _expand_item(part)))
    num_signs = _count_signs(node)
    if not 0 < num_signs <= MAX_SIGNS:
        return node
    if any(part.kind == "sign" and part.value == -1 for part in node.walk()):
        return Node("list", tuple(_choose_signs(node, (sign,) * num_signs) for sign in (1, -1)), "and")
    formulas = [_choose_signs(node, choice) for choice in product((1, -1), repeat=num_signs)]
    # Sums of equal numbers, as in \pm1\pm1, have fewer values than choices of signs.
    distinct = (
        {_value_or_tree(formula): formula for formula in formulas} if num_signs > 1 else dict(enumerate(formulas))
    )
    return Node("list", tuple(distinct.values()), "and")


def _expand_item(node: Node) -> tuple[Node, ...]:
    formulas = expand_signs(node)
    # A list within a list stays one item: x < 1 or (y > 2 and z < 3).
    return formulas.parts if formulas.kind == "list" and node.kind != "list" else (formulas,)


def _value_or_tree(node: Node) -> Node | Fraction:
    value = exact(node)
    return node if value is None else value


def _count_signs(node: Node) -> int:
    counts = [_count_signs(part) for part in node.parts]
    return max(counts) if node.kind == "relation" else sum(counts) + (node.kind == "sign")


def _choose_signs(node: Node, signs: Sequence[int]) -> Node:
    r"""Return the formula with each \pm and \mp replaced by the next of `signs` (1 or -1)."""
    if node.kind == "sign":
        inner = _choose_signs(node.parts[0], signs[1:])
        return inner if node.value == signs[0] else negative(inner)
    parts: list[Node] = []
    for part in node.parts:
        parts.append(_choose_signs(part, signs))
        if node.kind != "relation":
            signs = signs[_count_signs(part) :]
    return Node(node.kind, tuple(parts), node.value) if parts else node
