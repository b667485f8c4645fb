r"""Names given to values in answers: `x = 5`, `\angle ABC = 90`, `x=1, y=2`, `(x,y)=(1,2)`."""

from __future__ import annotations

from megarl.rewards.formulas.nodes import Node, symbol


def is_label(node: Node) -> bool:
    r"""Return whether a formula can be the name of a value: `x`, `a_1`, `f(x)`, an angle, words, `|A|`, `m\angle B`,
    `dy/dx`.
    """
    if node.kind in ("symbol", "index", "apply", "words"):
        return node.value != "ldots"
    if node.kind == "call" and node.value == "abs":
        return node.parts[0].kind == "symbol"
    if node.kind == "product":
        return len(node.parts) == 2 and node.parts[0] == symbol("m") and _is_shape(node.parts[1])
    return node.kind == "quotient" and all(
        part.kind == "product" and part.parts[0] == symbol("d") for part in node.parts
    )


def _is_shape(node: Node) -> bool:
    return node.kind == "symbol" and " " in node.value


def same_label(one: Node, other: Node) -> bool:
    """Return whether two names can mean the same value: equal names, one in words, or y and f(x)."""
    if one == other or "words" in (one.kind, other.kind):
        return True
    return {one.kind, other.kind} == {"symbol", "apply"} and symbol("y") in (one, other)


def _name(node: Node) -> str | None:
    if node.kind == "symbol":
        return node.value
    if node.kind == "index" and node.parts[0].kind in ("number", "symbol"):
        return f"{node.value}_{node.parts[0].value}"
    return None


def _pairs(node: Node) -> list[tuple[str, Node]] | None:
    """Return (name, value) pairs of a formula like `x=1, y=2`, `(x,y)=(1,2)` or `x=y=2`. A name may occur twice."""
    if node.kind == "relation" and set(node.value) == {"="}:
        left, right = node.parts[0], node.parts[-1]
        if left.kind == right.kind == "tuple" and len(node.parts) == 2 and len(left.parts) == len(right.parts):
            names = [_name(part) for part in left.parts]
            return [(n, v) for n, v in zip(names, right.parts, strict=True) if n] if all(names) else None
        names = [_name(part) for part in node.parts[:-1]]
        if not all(names) or (len(names) > 1 and _name(right)):
            return None
        return [(name, right) for name in names if name]
    if node.kind != "list":
        return None
    found: list[tuple[str, Node]] = []
    for part in node.parts:
        pairs = _pairs(part)
        if pairs is None:
            return None
        found.extend(pairs)
    return found


def assignments(node: Node) -> dict[str, Node] | None:
    """Return values by name if a formula assigns values to at least two names. None: any other formula."""
    pairs = _pairs(node) if node.kind != "list" or node.value != "or" else None
    found = dict(pairs or ())
    return found if pairs and len(found) == len(pairs) > 1 else None


def solutions(node: Node) -> tuple[str | None, Node]:
    """Return the name and the values of alternatives like `x=1 or x=2`. Other formulas: None and the formula
    itself.
    """
    if node.kind == "list":
        pairs = _pairs(node)
        if pairs and len({name for name, _ in pairs}) == 1:
            return pairs[0][0], Node("list", tuple(value for _, value in pairs), node.value)
        first = node.parts[0]
        is_shared = first.kind == "relation" and first.value == ("=",) and _name(first.parts[0]) is not None
        if is_shared and not any(part.kind == "relation" for part in node.parts[1:]):
            # `x = 1, 2` and `x = 1 or 2`: the name applies to all values.
            return _name(first.parts[0]), Node("list", (first.parts[1], *node.parts[1:]), node.value)
    return None, node


def without_domain(node: Node) -> Node:
    r"""Return the formula without the set of its parameter's values after it: `\frac{\pi}{2} + k\pi, k \in
    \mathbb{Z}`.
    """
    if node.kind != "list" or node.value != "," or len(node.parts) < 2:
        return node
    last = node.parts[-1]
    is_domain = last.kind == "relation" and last.value == ("in",) and last.parts[1].value in ("mathbbZ", "mathbbN")
    if not is_domain or not all(part.value in first.symbols() for part in last.parts[:1] for first in node.parts[:1]):
        return node
    return node.parts[0] if len(node.parts) == 2 else Node("list", node.parts[:-1], ",")
