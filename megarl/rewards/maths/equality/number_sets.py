"""Sets of real numbers: intervals, unions, solutions of inequalities. Two sets are compared at sample points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from megarl.rewards.maths.equality.exact import NoValueError, exact
from megarl.rewards.maths.equality.precision import as_fraction
from megarl.rewards.maths.equality.values import real_value
from megarl.rewards.maths.formulas.nodes import BLANK, EMPTY_SET, INFINITY, Node, negative, symbol

_NEAR = Fraction(1, 10**40)
"""Relative difference below which numbers are equal. Values are computed with 50 digits."""
_STEPS = (Fraction(1, 10**12), Fraction(1, 10**6), Fraction(1, 100))
"""Relative distances from an interval's end at which two sets are compared."""
_GRID = (*(Fraction(step * 7, 3) for step in range(-9, 10)), Fraction(1001, 3), Fraction(-1001, 3))
"""Points for the comparison of any two sets."""
INEQUALITIES = frozenset(("<", "<=", ">", ">=", "!="))
MAX_EDGES = 40


@dataclass(frozen=True, slots=True)
class NumberSet:
    """A set of real numbers, as a function that tests membership.

    `edges` are the numbers where membership may change; None: some are unknown. `variable` is an inequality's variable.
    """

    contains: Callable[[Fraction], bool]
    edges: tuple[Fraction, ...] | None
    variable: str | None = None


def same_set(gold: Node, prediction: Node) -> bool | None:
    """Return whether two formulas mean the same set of real numbers. None: one formula does not mean a set."""
    gold_set = _read_if_number_set(gold)
    predicted_set = _read_if_number_set(prediction) if gold_set is not None else None
    if gold_set is None or predicted_set is None:
        return None
    if gold_set.variable and predicted_set.variable and gold_set.variable != predicted_set.variable:
        return False
    edges = (gold_set.edges or ()) + (predicted_set.edges or ())
    # Without an edge, agreement at the fixed points alone proves nothing, unless no edges are known to exist.
    if (not edges and None in (gold_set.edges, predicted_set.edges)) or len(edges) > MAX_EDGES:
        return None
    return all(gold_set.contains(point) == predicted_set.contains(point) for point in _make_sample_points(edges))


def _make_sample_points(edges: tuple[Fraction, ...]) -> list[Fraction]:
    near_edges = [edge + sign * step * (1 + abs(edge)) for edge in edges for step in _STEPS for sign in (-1, 1)]
    sorted_edges = sorted(edges)
    between = [(low + high) / 2 for low, high in pairwise(sorted_edges)]
    return [*edges, *near_edges, *between, *_GRID]


def _read_if_number_set(node: Node) -> NumberSet | None:
    """Return the set that a formula means. None: it means no set, or has a number that cannot be computed."""
    try:
        return _read_number_set(node)
    except NoValueError:
        return None


def _read_number_set(node: Node) -> NumberSet | None:
    """Return the set that a formula means, or None. Raises NoValueError if one of its numbers cannot be computed."""
    if node.kind == "tuple":
        return _read_interval(node)
    if node.kind == "set":
        return _make_finite_set(node)
    if node == EMPTY_SET:
        return NumberSet(lambda point: False, ())
    if node == symbol("mathbbR"):
        return NumberSet(lambda point: True, ())
    if node.kind == "setop":
        return _combine_sets([_read_number_set(part) for part in node.parts], node.value)
    if node.kind == "relation":
        return _read_solutions(node)
    # \mathbb{R} - \{0\} is a set difference.
    if node.kind == "sum" and len(node.parts) == 2 and node.parts[1].kind == "negative":
        sets = [_read_number_set(node.parts[0]), _read_number_set(node.parts[1].parts[0])]
        return _combine_sets(sets, "setminus")
    if node.kind == "builder":
        return _read_set_builder(node)
    if node.kind == "list" and all(part.kind in ("relation", "list") for part in node.parts):
        return _join_conditions(node)
    return None


def _read_interval(node: Node) -> NumberSet | None:
    """Return an interval as a set. None: the tuple is not an interval, but a pair of numbers."""
    if len(node.parts) != 2:
        return None
    low, high = (_read_end(part) for part in node.parts)
    has_low, has_high = node.value[0] == "[", node.value[1] == "]"
    # An infinite end must be open, and an interval's ends must be in order. Otherwise it is a pair of numbers.
    if (low is None and (has_low or node.parts[0] == INFINITY)) or (high is None and has_high):
        return None
    if (high is None and node.parts[1] != INFINITY) or (low is not None and high is not None and low >= high):
        return None

    def contains(point: Fraction) -> bool:
        is_above = low is None or _is_below(low, point) or (has_low and _is_near(low, point))
        is_below = high is None or _is_below(point, high) or (has_high and _is_near(high, point))
        return is_above and is_below

    return NumberSet(contains, tuple(end for end in (low, high) if end is not None))


def _read_end(node: Node) -> Fraction | None:
    return None if node in (INFINITY, negative(INFINITY)) else _read_number(node)


def _read_number(node: Node) -> Fraction:
    value = exact(node)
    return as_fraction(real_value(node)) if value is None else value


def _make_finite_set(node: Node) -> NumberSet:
    elements = tuple(_read_number(part) for part in node.parts)
    return NumberSet(lambda point: any(_is_near(element, point) for element in elements), elements)


def _combine_sets(sets: list[NumberSet | None], sign: str) -> NumberSet | None:
    first, second = sets
    if first is None or second is None:
        return None
    edges = None if first.edges is None or second.edges is None else first.edges + second.edges
    membership_tests: dict[str, Callable[[Fraction], bool]] = {
        "cup": lambda point: first.contains(point) or second.contains(point),
        "cap": lambda point: first.contains(point) and second.contains(point),
        "setminus": lambda point: first.contains(point) and not second.contains(point),
    }
    variables = {numbers.variable for numbers in (first, second) if numbers.variable}
    return (
        NumberSet(membership_tests[sign], edges, variables.pop())
        if len(variables) == 1
        else NumberSet(membership_tests[sign], edges)
    )


def _read_solutions(node: Node) -> NumberSet | None:
    r"""Return the solutions of inequalities or an equation in one variable, like `1 < x \le 2`."""
    node = _without_infinite_ends(node)
    if node.kind == "symbol":
        return NumberSet(lambda point: True, (), node.value)
    names = node.symbols() - {"mathbbR"}
    if node.value == ("in",) and node.parts[0].kind == "symbol":
        numbers = _read_number_set(node.parts[1])
        return numbers and NumberSet(numbers.contains, numbers.edges, node.parts[0].value)
    if node.value == ("notin",) and node.parts[0].kind == "symbol":
        numbers = _read_number_set(node.parts[1])
        return numbers and NumberSet(lambda point: not numbers.contains(point), numbers.edges, node.parts[0].value)
    if len(names) != 1 or BLANK in node.parts or not set(node.value) <= INEQUALITIES | {"="}:
        return None
    (name,) = names
    variable = symbol(name)

    def contains(point: Fraction) -> bool:
        try:
            values = [as_fraction(real_value(part, {name: point})) for part in node.parts]
        except NoValueError:
            return False
        return all(map(_is_true, values, node.value, values[1:]))

    # Edges are known only if the variable stands alone between numbers.
    is_plain = all((before == variable) != (after == variable) for before, after in pairwise(node.parts))
    ends = [part for part in node.parts if part != variable]
    if not is_plain or any(end.symbols() for end in ends):
        return NumberSet(contains, None, name)
    return NumberSet(contains, tuple(_read_number(end) for end in ends), name)


def _without_infinite_ends(relation: Node) -> Node:
    r"""Return `-\infty < x < 3` as `x < 3`, and `-\infty < x < \infty` as `x`."""
    parts, signs = list(relation.parts), list(relation.value)
    if signs and (parts[0], signs[0]) in ((negative(INFINITY), "<"), (INFINITY, ">")):
        parts, signs = parts[1:], signs[1:]
    if signs and (parts[-1], signs[-1]) in ((INFINITY, "<"), (negative(INFINITY), ">")):
        parts, signs = parts[:-1], signs[:-1]
    if signs:
        return Node("relation", tuple(parts), tuple(signs))
    return parts[0] if parts[0].kind == "symbol" else relation


def _is_true(left: Fraction, sign: str, right: Fraction) -> bool:
    is_equal = _is_near(left, right)
    return {
        "=": is_equal,
        "!=": not is_equal,
        "<": not is_equal and left < right,
        ">": not is_equal and left > right,
        "<=": is_equal or left < right,
        ">=": is_equal or left > right,
    }[sign]


def _read_set_builder(node: Node) -> NumberSet | None:
    r"""Return the set of a set-builder formula, `\{x : x > 2\}` or `\{x \in A : x > 2\}`. None: it means no set."""
    head, condition = node.parts
    domain = None
    if head.kind == "relation" and head.value == ("in",):
        variable, domain_node = head.parts
        domain = _read_number_set(domain_node)
        if domain is None:
            return None
    else:
        variable = head
    solutions = _read_number_set(condition)
    # The condition must be about the variable before the colon.
    if variable.kind != "symbol" or solutions is None or solutions.variable != variable.value:
        return None
    numbers = solutions if domain is None else _combine_sets([domain, solutions], "cap")
    # A set-builder formula is complete: its variable's name does not matter in a comparison.
    return numbers and NumberSet(numbers.contains, numbers.edges)


def _join_conditions(node: Node) -> NumberSet | None:
    """Return the solutions of several relations: the union for `or`, otherwise the intersection.

    Relations separated by commas mean their union if the intersection is empty.
    """
    sets = [_read_number_set(part) for part in node.parts]
    number_sets = [numbers for numbers in sets if numbers is not None]
    if len(number_sets) < len(sets) or len({numbers.variable for numbers in number_sets}) > 1:
        return None
    # Several equations are solutions to be compared as a list.
    if all(part.kind == "relation" and set(part.value) == {"="} for part in node.parts):
        return None
    has_edges = all(numbers.edges is not None for numbers in number_sets)
    edges = tuple(edge for numbers in number_sets for edge in numbers.edges or ()) if has_edges else None
    is_union = node.value == "or"
    if node.value == "," and edges is not None:
        is_union = not any(
            all(numbers.contains(point) for numbers in number_sets) for point in _make_sample_points(edges)
        )
    combine = any if is_union else all
    return NumberSet(
        lambda point: combine(numbers.contains(point) for numbers in number_sets), edges, number_sets[0].variable
    )


def _is_near(first: Fraction, second: Fraction) -> bool:
    return abs(first - second) <= _NEAR * max(1, abs(first))


def _is_below(first: Fraction, second: Fraction) -> bool:
    return first < second and not _is_near(first, second)
