"""Syntax tree of a formula."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any


@dataclass(frozen=True, slots=True)
class Node:
    r"""Node of a formula's syntax tree. Equal trees are the same formula.

    Kinds: number (value: Fraction), symbol and constant (value: name), sum, product, quotient, power, negative, sign
    (value: 1 for \pm, -1 for \mp), call (value: function), apply (value: unknown function), index (value: name;
    a_{n+1}), tuple (value: its brackets), list (value: `,`, `and` or `or`), set, builder (variable, condition), matrix
    (value: environment; parts: rows), row, relation (value: signs between the parts), setop (value: sign), ratio
    (value: `to` if written so), transpose, words (value: text), quantity (value: unit), blank, numeral (a number with
    its base; value: digits), cross (product of two vectors), series (body, first and last index; value: sum or product,
    and the index), congruence (name, representative, modulus), clock (value: AM, PM or ""), groups (value: sign, and
    the digits as written).
    """

    kind: str
    parts: tuple[Node, ...] = ()
    value: Any = None

    def walk(self) -> Iterator[Node]:
        yield self
        for part in self.parts:
            yield from part.walk()

    def symbols(self) -> set[str]:
        """Return the names of all variables and unknown functions, without indices of sums."""
        nodes = list(self.walk())
        names = {node.value for node in nodes if node.kind in ("symbol", "apply", "index")}
        return names - {node.value[1] for node in nodes if node.kind == "series"}


BLANK = Node("blank")
INFINITY = Node("constant", (), "infty")
DEGREE = Node("constant", (), "degree")
EMPTY_SET = Node("constant", (), "emptyset")
OTHERWISE = Node("symbol", (), "otherwise")
"""The condition of a value for all other cases."""


def number(value: Fraction | int) -> Node:
    return Node("number", (), Fraction(value))


def symbol(name: str) -> Node:
    return Node("symbol", (), name)


def negative(node: Node) -> Node:
    # Fold signs into numbers and cancel double ones, so that equal formulas have equal trees.
    if node.kind == "number":
        return number(-node.value)
    return node.parts[0] if node.kind == "negative" else Node("negative", (node,))


def join_operands(kind: str, parts: list[Node]) -> Node:
    """Return a sum or product (`kind`) of `parts`, without nested ones. A single part is returned alone."""
    flat = [part for node in parts for part in (node.parts if node.kind == kind else (node,))]
    return flat[0] if len(flat) == 1 else Node(kind, tuple(flat))


def replace_node(node: Node, old: Node, new: Node) -> Node:
    if node == old:
        return new
    return (
        Node(node.kind, tuple(replace_node(part, old, new) for part in node.parts), node.value) if node.parts else node
    )
