r"""Names given to values in answers: `x = 5`, `\angle ABC = 90`, `x=1, y=2`, `(x,y)=(1,2)`."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from megarl.rewards.maths.equality.kinds import is_capital_letter, is_equation
from megarl.rewards.maths.equality.values import NAMES_OF_WHOLE_NUMBERS
from megarl.rewards.maths.formulas.nodes import Node, number, symbol

_EXTREMES = ("max", "min")
_VARIABLES = frozenset("stuxyz")
"""Letters that are hardly ever constants."""
_DOMAINS = ("mathbbZ", "mathbbN", "mathbbQ", "mathbbR", "mathbbC")
_DOMAINS_OF_FRACTIONS = ("mathbbQ", "mathbbR", "mathbbC")


def is_label(node: Node) -> bool:
    """Return whether a formula can name a value: `x`, `a_1`, `f(x)`, an angle, words, `|A|`, `dy/dx`."""
    if node.kind in ("symbol", "index", "apply", "words"):
        return node.value != "ldots"
    if node.kind == "call":
        return node.value in _EXTREMES or (node.value == "abs" and node.parts[0].kind == "symbol")
    # A^{-1} and A^T name matrices.
    if node.kind in ("power", "transpose"):
        is_inverse = node.kind == "transpose" or node.parts[1] == number(-1)
        return is_inverse and is_capital_letter(node.parts[0])
    if node.kind == "product":
        return len(node.parts) == 2 and node.parts[0] == symbol("m") and _is_shape(node.parts[1])
    return False


def is_of_other_variable(label: Node, value: Node) -> bool:
    """Return whether a label is a function of another variable, N(s) = 2t for t, or of a power: f(x^2) = x."""
    names = value.symbols()
    if label.kind == "apply" and any(_is_power_of(part, names) for part in label.parts):
        return True
    arguments = {part.value for part in label.parts} if label.kind == "apply" else set()
    return bool(names and arguments) and names | arguments <= _VARIABLES and names.isdisjoint(arguments)


def _is_power_of(argument: Node, names: Collection[str]) -> bool:
    """Return whether an argument is a power of one of `names`. f(x^2) = x has another argument than f(x)."""
    return argument.kind == "power" and argument.parts[0].kind == "symbol" and argument.parts[0].value in names


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
    derivative, other_derivative = _read_derivative(first), _read_derivative(second)
    if derivative is not None or other_derivative is not None:
        return derivative is not None and other_derivative is not None and derivative.may_be(other_derivative)
    has_power = any(part.kind == "power" for node in (first, second) for part in node.parts)
    return {first.kind, second.kind} == {"symbol", "apply"} and symbol("y") in (first, second) and not has_power


class _Derivative(NamedTuple):
    """A derivative of a function, `f'(x)` or `dy/dx`. `variable` is None in `y'`."""

    function: str
    variable: Node | None
    order: int

    def may_be(self, other: _Derivative) -> bool:
        """Return whether two derivatives are the same. y may be called f, and may lack its variable."""
        functions = {self.function, other.function}
        is_same_function = len(functions) == 1 or (functions & {"y"} and functions & {"f", "F"})
        is_same_variable = None in (self.variable, other.variable) or self.variable == other.variable
        return bool(is_same_function) and is_same_variable and self.order == other.order


def _read_derivative(node: Node) -> _Derivative | None:
    """Return the derivative that a name means, or None."""
    if node.kind == "apply" and node.value == "derivative":
        (function, order), (variable, power) = map(_read_differential, node.parts)
        return _Derivative(function.value, variable, order) if function is not None and order == power else None
    if node.kind not in ("symbol", "apply") or not node.value.endswith("'") or node.value.endswith("^-1'"):
        return None
    function_name = node.value.rstrip("'")
    variable = node.parts[0] if node.kind == "apply" and len(node.parts) == 1 else None
    return _Derivative(function_name, variable, len(node.value) - len(function_name))


def _read_differential(node: Node) -> tuple[Node | None, int]:
    r"""Return the letter of `dx`, `dx^2` or `d^2y`, and the power. The letter is None for anything else."""
    if node.kind != "product" or len(node.parts) != 2:
        return None, 0
    bases = [part.parts[0] if part.kind == "power" else part for part in node.parts]
    powers = [part.parts[1].value for part in node.parts if part.kind == "power" and part.parts[1].kind == "number"]
    is_plain = bases[1].kind in ("symbol", "apply") and len(powers) < 2
    return (bases[1], int(powers[0]) if powers else 1) if is_plain else (None, 0)


def _name_of(node: Node) -> str | None:
    if node.kind == "symbol":
        return node.value
    if node.kind == "words":
        return f"the words {node.value}"
    if node.kind == "index" and node.parts[0].kind in ("number", "symbol"):
        return f"{node.value}_{node.parts[0].value}"
    # x_{1,2} names both values.
    return node.value if is_shared_index(node) else None


def is_shared_index(node: Node) -> bool:
    return node.kind == "index" and node.parts[0].kind == "list"


def _read_assignments(node: Node) -> list[tuple[str, Node]] | None:
    """Return the pairs (name, value) of a formula like `x=1, y=2`, `(x,y)=(1,2)` or `x=y=2`. Names may repeat."""
    if is_equation(node):
        first_side, last_side = node.parts[0], node.parts[-1]
        is_pair = (
            first_side.kind == last_side.kind == "tuple"
            and len(node.parts) == 2
            and len(first_side.parts) == len(last_side.parts)
        )
        if is_pair:
            names = [_name_of(part) for part in first_side.parts]
            if not all(names):
                return None
            return [(name, value) for name, value in zip(names, last_side.parts, strict=True) if name]
        names = [_name_of(part) for part in node.parts[:-1]]
        if not all(names) or (len(names) > 1 and _name_of(last_side)):
            return None
        return [(name, last_side) for name in names if name]
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


def are_coordinates(node: Node) -> bool:
    """Return whether a tuple has names in order, (x, y), so that points without names are in the same order."""
    names = [name for part in node.parts if (name := _name_of(part)) is not None]
    return node.kind == "tuple" and len(names) == len(node.parts) and names == in_order(names)


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
        first_item = node.parts[0]
        if first_item.kind == "relation" and first_item.value == ("=",) and first_item.parts[0].kind == "tuple":
            return _read_points(node)
        is_shared = (
            first_item.kind == "relation" and first_item.value == ("=",) and _name_of(first_item.parts[0]) is not None
        )
        if is_shared and not any(part.kind == "relation" for part in node.parts[1:]):
            # `x = 1, 2` and `x = 1 or 2`: the name applies to all values.
            return first_item.parts[0], Node("list", (first_item.parts[1], *node.parts[1:]), node.value)
    return None, node


def _read_points(node: Node) -> tuple[Node | None, Node]:
    """Return the names and the points of `(x,y)=(1,2) or (x,y)=(3,4)`, also if the names are given once."""
    names = node.parts[0].parts[0]
    points: list[Node] = []
    for part in node.parts:
        is_named = part.kind == "relation" and part.value == ("=",) and part.parts[0] == names
        points.append(part.parts[1] if is_named else part)
    is_readable = all(_name_of(name) for name in names.parts) and all(point.kind == "tuple" for point in points)
    return (names, Node("list", tuple(points), node.value)) if is_readable else (None, node)


def without_domain(node: Node) -> tuple[Node, Node | None]:
    r"""Split `k\pi, k \in \mathbb{Z}` into the formula and the set of its parameter's values (None: no set).

    The set stands last or first.
    """
    if node.kind != "list" or node.value not in (",", "and") or len(node.parts) < 2:
        return node, None
    for item, others in ((node.parts[-1], node.parts[:-1]), (node.parts[0], node.parts[1:])):
        is_domain = item.kind == "relation" and item.value == ("in",) and item.parts[1].value in _DOMAINS
        if is_domain and item.parts[0].value in others[0].symbols():
            return (others[0] if len(others) == 1 else Node("list", others, node.value)), item
    return node, None


def has_other_domain(gold: Node, domain: Node | None, prediction: Node, predicted_domain: Node | None) -> bool:
    r"""Return whether two domains disagree: \mathbb{Z} and \mathbb{R}.

    A prediction may lack its domain, but an interval is no set of whole numbers. It may add a domain, with two
    exceptions: an inequality, `x > 2`, and the coefficient of another variable, `y = kx`, hold for real numbers, and a
    parameter named like a whole number, `k\pi`, has no fractions as values.
    """
    if predicted_domain is None:
        is_whole = domain is not None and domain.parts[1].value not in _DOMAINS_OF_FRACTIONS
        return is_whole and _is_inequality(gold) and prediction.kind in ("tuple", "setop", "builder")
    name, numbers = predicted_domain.parts
    if domain is not None:
        return bool(domain.parts[1] != numbers)
    is_coefficient = is_equation(gold) and _is_coefficient(name, gold.parts[-1])
    if is_coefficient or any(map(_is_inequality, (gold, *gold.parts, prediction, *prediction.parts))):
        return numbers != symbol("mathbbR")
    return name.value in NAMES_OF_WHOLE_NUMBERS and numbers.value in _DOMAINS_OF_FRACTIONS


def _is_coefficient(name: Node, formula: Node) -> bool:
    r"""Return whether a letter is a coefficient of a variable: k in kx and k/x, but not in x + 2k\pi and x^k.

    Other letters than those of whole numbers are coefficients too: b in kx + b.
    """
    terms = [node for node in formula.walk() if node.kind in ("product", "quotient") and name in node.parts]
    if name.value not in NAMES_OF_WHOLE_NUMBERS:
        terms = [formula]
    return any(not (term.symbols() - {name.value}).isdisjoint(_VARIABLES) for term in terms)


def _is_inequality(node: Node) -> bool:
    return node.kind == "relation" and not {">", ">=", "<", "<="}.isdisjoint(node.value)


def with_shared_relation(node: Node) -> Node:
    r"""Return a list with its first relation repeated for bare values: `x \ne 1, 2` means x \ne 1, x \ne 2."""
    if node.kind != "list" or node.parts[0].kind != "relation" or node.parts[0].value != ("!=",):
        return node
    name, first_value = node.parts[0].parts
    if any(part.kind in ("relation", "list") for part in node.parts[1:]):
        return node
    return Node(
        "list", tuple(Node("relation", (name, value), ("!=",)) for value in (first_value, *node.parts[1:])), "and"
    )
