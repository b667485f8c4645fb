"""Trees of several formulas: lists joined by commas and words, and congruences with a common modulus."""

from __future__ import annotations

from megarl.rewards.maths.formulas.nodes import BLANK, Node
from megarl.rewards.maths.numbers import NotMathematicsError


def connect_items(items: list[Node], signs: list[str]) -> Node:
    """Return the items as a list. `and` binds closer than `or`; in `1, 2 or 3` the comma means `or`."""
    if not signs:
        return items[0]
    if not {"and", "or"} <= set(signs):
        connective = "or" if "or" in signs else "and" if "and" in signs else ","
        return Node("list", tuple(_with_shared_modulus(items)), connective)
    alternatives = [[items[0]]]
    for sign, item in zip(signs, items[1:], strict=True):
        if sign == "or":
            alternatives.append([])
        alternatives[-1].append(item)
    parts = [group[0] if len(group) == 1 else Node("list", tuple(group), "and") for group in alternatives]
    return Node("list", tuple(parts), "or")


def _with_shared_modulus(items: list[Node]) -> list[Node]:
    r"""Return `1, 4 \pmod 5` as congruences: values before a congruence have its modulus."""
    last = items[-1]
    if last.kind != "congruence" or any(item.kind == "congruence" for item in items[:-1]):
        return items
    first = items[0]
    is_named = first.kind == "relation" and first.value == ("equiv",)
    name = first.parts[0] if is_named else last.parts[0]
    values = [first.parts[1] if is_named else first, *items[1:-1], last.parts[1]]
    return [Node("congruence", (name, value, last.parts[2])) for value in values]


def make_congruence(parts: list[Node], signs: list[str], modulus: Node) -> Node:
    """Return a residue class: its name or a blank, its representative, and its modulus."""
    if len(parts) > 2 or signs not in ([], ["equiv"], ["="]):
        raise NotMathematicsError("a modulus follows something other than a congruence")
    return Node("congruence", (parts[0] if signs else BLANK, parts[-1], modulus))
