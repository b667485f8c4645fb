r"""Names given to values in answers: `x = 5`, `\angle ABC = 90`, `x=1, y=2`, `(x,y)=(1,2)`."""

from __future__ import annotations

from collections.abc import Collection

from megarl.rewards.maths.equality.kinds import is_equation
from megarl.rewards.maths.formulas.nodes import Node, symbol

_EXTREMES = ("max", "min")


def is_label(node: Node) -> bool:
    """Return whether a formula can name a value: `x`, `a_1`, `f(x)`, an angle, words, `|A|`, `dy/dx`."""
    if node.kind in ("symbol", "index", "apply", "words"):
        return node.value != "ldots"
    if node.kind == "call":
        return node.value in _EXTREMES or (node.value == "abs" and node.parts[0].kind == "symbol")
    if node.kind == "product":
        return len(node.parts) == 2 and node.parts[0] == symbol("m") and _is_shape(node.parts[1])
    return False


def may_be_asked_for(node: Node) -> bool:
    r"""Return whether a problem may ask for the value of `node`, the left side of an answer's equation.

    With `m+n = 7` or `\frac{m}{n} = 7` the answer is 7. `2x+3y = 12` is a line: nobody asks for the value of `2x+3y`.
    """
    nodes = list(node.walk())
    # 2x + 3y = 12 and x^2 + y^2 = 25 are lines and curves.
    if {symbol("x"), symbol("y")} <= set(nodes) and any(part.kind == "number" for part in nodes):
        return False
    return len({part for part in nodes if part.kind in ("symbol", "index", "apply")}) > 1


def _is_shape(node: Node) -> bool:
    return node.kind == "symbol" and " " in node.value


def same_label(first: Node, second: Node) -> bool:
    """Return whether two names can mean the same value: equal names, one in words, or y and f(x)."""
    if first == second or (first.kind == "words") != (second.kind == "words"):
        return True
    if first.kind == second.kind == "words":
        return first.value.removeprefix("the ") == second.value.removeprefix("the ")
    return {first.kind, second.kind} == {"symbol", "apply"} and symbol("y") in (first, second)


def _name_of(node: Node) -> str | None:
    if node.kind == "symbol":
        return node.value
    if node.kind == "words":
        return f"the words {node.value}"
    if node.kind == "index" and node.parts[0].kind in ("number", "symbol"):
        return f"{node.value}_{node.parts[0].value}"
    return None


def _read_assignments(node: Node) -> list[tuple[str, Node]] | None:
    """Return the pairs (name, value) of a formula like `x=1, y=2`, `(x,y)=(1,2)` or `x=y=2`. Names may repeat."""
    if is_equation(node):
        first, last = node.parts[0], node.parts[-1]
        is_pair = first.kind == last.kind == "tuple" and len(node.parts) == 2 and len(first.parts) == len(last.parts)
        if is_pair:
            names = [_name_of(part) for part in first.parts]
            if not all(names):
                return None
            return [(name, value) for name, value in zip(names, last.parts, strict=True) if name]
        names = [_name_of(part) for part in node.parts[:-1]]
        if not all(names) or (len(names) > 1 and _name_of(last)):
            return None
        return [(name, last) for name in names if name]
    if node.kind != "list":
        return None
    # A list of assignments: x=1, y=2.
    all_pairs: list[tuple[str, Node]] = []
    for part in node.parts:
        pairs = _read_assignments(part)
        if pairs is None:
            return None
        all_pairs.extend(pairs)
    return all_pairs


def assignments(node: Node) -> dict[str, Node] | None:
    """Return the values of at least two variables by their names, as in `x = 1, y = 2`; for other formulas None."""
    pairs = _read_assignments(node) if node.kind != "list" or node.value != "or" else None
    values = dict(pairs or ())
    return values if pairs and len(values) == len(pairs) > 1 else None


def are_numbered(names: Collection[str]) -> bool:
    """Return whether names are one letter with the numbers 1, 2, ..., like roots: x_1, x_2."""
    letters = {name.partition("_")[0] for name in names}
    return len(letters) == 1 and {name.partition("_")[2] for name in names} == set(map(str, range(1, len(names) + 1)))


def in_order(names: Collection[str]) -> list[str]:
    """Return names by letter, then by index: x_2 before x_10, and both before y."""

    def sort_key(name: str) -> tuple[str, int, str]:
        letter, _, index = name.partition("_")
        return letter, len(index), index

    return sorted(names, key=sort_key)


def solutions(node: Node) -> tuple[Node | None, Node]:
    """Return the name and the values of alternatives like `x=1 or x=2`; for other formulas, None and the formula."""
    if node.kind == "list":
        pairs = _read_assignments(node)
        if pairs and len({name for name, _ in pairs}) == 1:
            return node.parts[0].parts[0], Node("list", tuple(value for _, value in pairs), node.value)
        first = node.parts[0]
        is_shared = first.kind == "relation" and first.value == ("=",) and _name_of(first.parts[0]) is not None
        if is_shared and not any(part.kind == "relation" for part in node.parts[1:]):
            # `x = 1, 2` and `x = 1 or 2`: the name applies to all values.
            return first.parts[0], Node("list", (first.parts[1], *node.parts[1:]), node.value)
    return None, node


def without_domain(node: Node) -> tuple[Node, Node | None]:
    r"""Split `k\pi, k \in \mathbb{Z}` into the formula and the set of its parameter's values (None: no set)."""
    if node.kind != "list" or node.value != "," or len(node.parts) < 2:
        return node, None
    last_item = node.parts[-1]
    is_domain = (
        last_item.kind == "relation"
        and last_item.value == ("in",)
        and last_item.parts[1].value in ("mathbbZ", "mathbbN")
    )
    if not is_domain or not all(
        part.value in first.symbols() for part in last_item.parts[:1] for first in node.parts[:1]
    ):
        return node, None
    return (node.parts[0] if len(node.parts) == 2 else Node("list", node.parts[:-1], ",")), last_item


def with_shared_relation(node: Node) -> Node:
    r"""Return a list with its first relation repeated for bare values: `x \ne 1, 2` means x \ne 1, x \ne 2."""
    if node.kind != "list" or node.parts[0].kind != "relation" or node.parts[0].value != ("!=",):
        return node
    name, first = node.parts[0].parts
    if any(part.kind in ("relation", "list") for part in node.parts[1:]):
        return node
    return Node("list", tuple(Node("relation", (name, value), ("!=",)) for value in (first, *node.parts[1:])), "and")
