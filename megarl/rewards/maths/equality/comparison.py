"""Equality of two parsed answers: numbers, formulas, equations, pairs, lists, sets, matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

from megarl.rewards.maths.equality.digit_groups import as_formula, same_digit_groups
from megarl.rewards.maths.equality.exact import exact
from megarl.rewards.maths.equality.labels import (
    assignments,
    is_label,
    is_sought,
    same_label,
    solutions,
    with_shared_relation,
    without_domain,
)
from megarl.rewards.maths.equality.number_sets import INEQUALITIES, same_set
from megarl.rewards.maths.equality.values import is_proportional, is_within_percent, same_value
from megarl.rewards.maths.formulas.nodes import (
    BLANK,
    DEGREE,
    EMPTY_SET,
    INFINITY,
    Node,
    joined,
    negative,
    number,
    replaced,
    symbol,
)

MAX_MATCHED = 40
"""Maximum length of lists compared in any order, because that takes quadratic time. Longer ones are compared in
order.
"""
MAX_SIGNS = 4
r"""Maximum number of \pm and \mp in a formula expanded. Each doubles the number of values."""
_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "=": "=", "!=": "!="}
_DOTS = symbol("ldots")
_CONSTANTS_OF_INTEGRATION = ("C", "c", "K", "k")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of a predicted with a gold answer. `factor` multiplies predicted numbers, to convert their unit."""

    factor: Fraction = Fraction(1)

    def same(self, gold: Node, predicted: Node) -> bool:
        """Return whether the predicted answer equals the gold one."""
        gold, domain = without_domain(gold)
        predicted, predicted_domain = without_domain(_without_rounding(predicted))
        if domain is not None and predicted_domain is not None:
            if domain.parts[1] != predicted_domain.parts[1]:
                return False
            predicted = _renamed(predicted, predicted_domain.parts[0], domain.parts[0])
        gold = with_shared_relation(both_signs(_without_sign_of_approximation(gold)))
        predicted = with_shared_relation(both_signs(_without_sign_of_approximation(predicted)))
        if gold == predicted and self.factor == 1:
            return True
        # The sides of a relation and the items of a list are compared for themselves.
        if not {gold.kind, predicted.kind} & {"relation", "list", "set"}:
            by_digits = same_digit_groups(gold, predicted)
            if by_digits is not None:
                return by_digits
            gold, predicted = as_formula(gold), as_formula(predicted)
        if gold.kind == "numeral" or (gold.kind == "negative" and gold.parts[0].kind == "numeral"):
            return _same_numeral(gold, predicted)
        if "congruence" in (gold.kind, predicted.kind):
            return gold.kind == predicted.kind and self._same_congruence(gold, predicted)
        by_name = self._named(gold, predicted)
        if by_name is not None:
            return by_name
        gold_name, gold = solutions(gold)
        predicted_name, predicted = solutions(predicted)
        # x = 5 and y = 5 are different answers. A name in one of them only is ignored.
        if gold_name and predicted_name and not same_label(gold_name, predicted_name):
            return False
        if any(node.kind == "relation" or _is_condition(node) for node in (gold, predicted)):
            return self._related(gold, predicted)
        return self._unrelated(gold, predicted)

    def _named(self, gold: Node, predicted: Node) -> bool | None:
        """Return whether values with names, as in `x=1, y=2`, agree. None: neither answer has names."""
        golds, found = assignments(gold), assignments(predicted)
        if golds and found:
            return golds.keys() == found.keys() and all(self.same(golds[name], found[name]) for name in golds)
        if not golds and not found:
            return None
        values, other = (golds, predicted) if golds else (found, gold)
        if other.kind in ("list", "set"):
            return False
        if other.kind != "tuple" or other.value != "()" or len(other.parts) != len(values or {}):
            return None
        # (1, 2) as answer to x=1, y=2: values in the order of their names.
        ordered = [value for _, value in sorted((values or {}).items())]
        pairs = zip(ordered, other.parts, strict=True)
        return all(self.same(one, two) if golds else self.same(two, one) for one, two in pairs)

    def _related(self, gold: Node, predicted: Node) -> bool:
        verdict = same_set(gold, predicted)
        # Every equation in one variable is a set of solutions too, but as an equation it must agree itself.
        if verdict is not None and not _is_equation(gold):
            return verdict
        if gold.kind == "list" or predicted.kind == "list":
            return self._same_lists(gold, predicted)
        if gold.kind == predicted.kind == "relation":
            return self._same_relation(gold, predicted)
        if gold.kind == "relation":
            if gold.value == ("in",):
                # `x \in A` and A alone are the same answer.
                return gold.parts[0].kind == "symbol" and self.same(gold.parts[1], predicted)
            return _is_equation(gold) and is_label(gold.parts[0]) and self.same(gold.parts[-1], predicted)
        if predicted.value == ("in",):
            return predicted.parts[0].kind == "symbol" and self.same(gold, predicted.parts[1])
        return _is_equation(predicted) and self._names_or_holds(gold, predicted.parts)

    def _same_lists(self, gold: Node, predicted: Node) -> bool:
        """Return whether conditions, or what one of them is compared with, are equal item by item."""
        if gold.kind == predicted.kind == "list":
            return self._same_items(gold, predicted)
        if gold.kind == "relation" and _is_equation(gold) and is_label(gold.parts[0]):
            return self.same(gold.parts[-1], predicted)
        return _is_equation(predicted) and is_label(predicted.parts[0]) and self.same(gold, predicted.parts[-1])

    def _names_or_holds(self, gold: Node, parts: Sequence[Node]) -> bool:
        """Return whether a predicted equation assigns the gold value to a name (`x = 5`, `5 = x`) or computes it (`2+3
        = 5`).
        """
        # An expression of several variables does not determine one of them, so its value is the answer.
        if not gold.symbols() and is_sought(parts[0]):
            return all(self.same(gold, value) for value in parts[1:])
        values = [part for part in parts if not is_label(part)]
        # With two names or more, the gold answer must be a symbol itself: y = x.
        if len(values) < len(parts) - 1:
            return gold.kind == "symbol" and self.same(gold, parts[-1])
        is_named = len(values) == len(parts) or is_label(parts[0]) or is_label(parts[-1])
        return is_named and all(self.same(gold, value) for value in values)

    def _same_relation(self, gold: Node, predicted: Node) -> bool:
        # Relations such as "subset" have no arithmetic, so compare them part by part.
        if BLANK in gold.parts or BLANK in predicted.parts or not _is_arithmetic(gold) or not _is_arithmetic(predicted):
            is_alike = gold.value == predicted.value and len(gold.parts) == len(predicted.parts)
            return is_alike and all(map(self.same, gold.parts, predicted.parts))
        if _is_equation(gold) and _is_equation(predicted):
            return self._same_equation(gold, predicted)
        # Bring each step to the form "difference < 0". Equal up to positive factors then means equivalent.
        one, other = _steps(gold), _steps(predicted)
        return len(one) == len(other) and all(
            sign == found
            # An inequation != may also be multiplied by a negative number.
            and (is_proportional(part, against) > 0 or (sign == "!=" and is_proportional(part, against) < 0))
            for (part, sign), (against, found) in zip(one, other, strict=True)
        )

    def _same_equation(self, gold: Node, predicted: Node) -> bool:
        left, right = gold.parts[0], gold.parts[-1]
        found_left, found_right = predicted.parts[0], predicted.parts[-1]
        # 5 = x is read as x = 5.
        if is_label(found_right) and not is_label(found_left):
            found_left, found_right = found_right, found_left
        if is_label(right) and not is_label(left):
            left, right = right, left
        found_left, found_right = _with_argument_of(left, found_left, found_right)
        if is_label(left) and is_label(found_left) and same_label(left, found_left) and self.same(right, found_right):
            return True
        # x = 5 has a single solution, so a multiple such as 2x = 10 must not match it by proportion.
        if len(gold.parts) > 2 or len(predicted.parts) > 2 or (is_label(left) and not right.symbols()):
            return False
        difference = joined("sum", [left, negative(right)])
        found = joined("sum", [found_left, negative(found_right)])
        # Either side may be solved for a variable: y = 2x + 1 and 2x - y + 1 = 0.
        is_solved = _determines(left, right, found) or _determines(found_left, found_right, difference)
        return is_solved or is_proportional(difference, found) != 0

    # A union or condition makes both sides sets, even if the other one looks like a tuple.
    def _unrelated(self, gold: Node, predicted: Node) -> bool:
        if any(_is_number_set(node) for node in (gold, predicted)):
            return self._same_sets(gold, predicted)
        if gold.kind in ("list", "set") and predicted.kind in ("list", "set"):
            return self._same_items(gold, predicted)
        if gold.kind == "tuple" or predicted.kind == "tuple":
            return self._same_tuples(gold, predicted)
        # A set of one element equals the element.
        if gold.kind == "set" or predicted.kind == "set":
            one, other = (each.parts if each.kind == "set" else (each,) for each in (gold, predicted))
            return len(one) == len(other) == 1 and self.same(one[0], other[0])
        gold, predicted = _with_matrix(gold), _with_matrix(predicted)
        if "matrix" in (gold.kind, predicted.kind) or "transpose" in (gold.kind, predicted.kind):
            is_alike = (gold.kind, gold.value, len(gold.parts)) == (
                predicted.kind,
                predicted.value,
                len(predicted.parts),
            )
            return is_alike and all(map(self._same_row, gold.parts, predicted.parts))
        if "ratio" in (gold.kind, predicted.kind):
            return self._same_ratio(gold, predicted)
        return self._same_expression(gold, predicted)

    def _same_row(self, gold: Node, predicted: Node) -> bool:
        if gold.kind != "row" or predicted.kind != "row":
            return self.same(gold, predicted)
        return len(gold.parts) == len(predicted.parts) and all(map(self.same, gold.parts, predicted.parts))

    def _same_sets(self, gold: Node, predicted: Node) -> bool:
        verdict = same_set(gold, predicted)
        if verdict is not None:
            return verdict
        if gold.kind != predicted.kind or gold.value != predicted.value:
            return False
        if gold.kind == "setop" and gold.value in ("cup", "cap"):
            return self._match(_operands(gold, gold.value), _operands(predicted, gold.value))
        return all(map(self.same, gold.parts, predicted.parts))

    def _same_items(self, gold: Node, predicted: Node) -> bool:
        # Values may be joined by any word, but "A or B" names two choices, and conditions mean something else.
        if _is_either(gold) != _is_either(predicted) and (_has_statements(gold) or _has_statements(predicted)):
            return False
        one, other = gold.parts, predicted.parts
        # Solutions given as equations are not values: keep x = 1, x = 2 apart from 1, 2.
        if not any(_is_equation(part) for part in one) and any(_is_equation(part) for part in other):
            return False
        # With dots the order matters: 1, 2, 3, ... is a sequence.
        if _DOTS in one or _DOTS in other:
            return len(one) == len(other) and all(map(self.same, one, other))
        if "set" in (gold.kind, predicted.kind):
            one, other = self._distinct(one), self._distinct(other)
        return self._match(one, other)

    def _distinct(self, parts: Sequence[Node]) -> list[Node]:
        found: list[Node] = []
        for part in parts[:MAX_MATCHED]:
            if not any(Comparison().same(part, other) for other in found):
                found.append(part)
        return [*found, *parts[MAX_MATCHED:]]

    def _match(self, golds: Sequence[Node], predicted: Sequence[Node]) -> bool:
        """Return whether two lists of formulas have equal items, in any order."""
        if len(golds) != len(predicted):
            return False
        if len(golds) > MAX_MATCHED:
            return all(map(self.same, golds, predicted))
        left = list(predicted)
        for gold in golds:
            place = next((place for place, each in enumerate(left) if self.same(gold, each)), None)
            if place is None:
                return False
            left.pop(place)
        return True

    def _same_tuples(self, gold: Node, predicted: Node) -> bool:
        predicted = _without_point_name(predicted)
        # A list without brackets may be a tuple, except with infinity: that is an interval.
        if predicted.kind == "list" and predicted.value == "," and gold.value == "()" and INFINITY not in gold.walk():
            predicted = Node("tuple", predicted.parts, "()")
        if gold.kind != "tuple" or predicted.kind != "tuple" or gold.value != predicted.value:
            return False
        return len(gold.parts) == len(predicted.parts) and all(map(self.same, gold.parts, predicted.parts))

    def _same_ratio(self, gold: Node, predicted: Node) -> bool:
        if gold.kind == predicted.kind == "ratio":
            if len(gold.parts) != len(predicted.parts):
                return False
            zeros = [exact(part) == 0 for part in gold.parts]
            if zeros != [exact(part) == 0 for part in predicted.parts]:
                return False
            sides = zip(gold.parts, predicted.parts, zeros, strict=True)
            pairs = [(one, two) for one, two, is_zero in sides if not is_zero]
            # With one part left there is no proportion: 5:0 is not 7:0.
            if len(pairs) < 2:
                return all(self.same(one, two) for one, two in pairs)
            first, found = pairs[0]
            # a : b = c : d exactly if a d = b c for all parts.
            return all(
                same_value(joined("product", [first, two]), joined("product", [found, one])) for one, two in pairs[1:]
            )
        # 48 to 1 is not 48.
        if any(each.value == "to" for each in (gold, predicted)) and any(
            each.kind == "number" for each in (gold, predicted)
        ):
            return False
        if any(exact(part) == 0 for each in (gold, predicted) if each.kind == "ratio" for part in each.parts):
            return False
        one, other = (_as_quotient(each) for each in (gold, predicted))
        return one is not None and other is not None and same_value(one, other)

    def _same_congruence(self, gold: Node, predicted: Node) -> bool:
        if BLANK not in (gold.parts[0], predicted.parts[0]) and not self.same(gold.parts[0], predicted.parts[0]):
            return False
        if not same_value(gold.parts[2], predicted.parts[2]):
            return False
        steps = exact(Node("quotient", (joined("sum", [gold.parts[1], negative(predicted.parts[1])]), gold.parts[2])))
        return steps.denominator == 1 if steps is not None else self.same(gold.parts[1], predicted.parts[1])

    def _same_expression(self, gold: Node, predicted: Node) -> bool:
        gold_degrees, predicted_degrees = _degrees(gold), _degrees(predicted)
        # Only one side is in degrees: pi on the other side means radians, otherwise the sign was left out.
        if (gold_degrees is None) != (predicted_degrees is None):
            plain = gold if gold_degrees is None else predicted
            if not any(node.kind == "constant" and node.value == "pi" for node in plain.walk()):
                gold, predicted = gold_degrees or gold, predicted_degrees or predicted
        return same_value(gold, _with_constant_of(gold, predicted), self.factor)


def both_signs(node: Node) -> Node:
    r"""Expand \pm and \mp: return the list of formulas meant, without repeated numbers.

    Every \pm is independent: `\pm1\pm i` means four numbers. With \mp all signs change together. In a relation, the
    n-th signs of both sides change together. Formulas with more than MAX_SIGNS signs are returned unchanged.
    """
    if node.kind == "list":
        return Node("list", tuple(formula for part in node.parts for formula in _formulas_meant(part)), node.value)
    if node.kind == "set":
        return Node("set", tuple(formula for part in node.parts for formula in _formulas_meant(part)))
    signs = _count_signs(node)
    if not 0 < signs <= MAX_SIGNS:
        return node
    if any(part.kind == "sign" and part.value == -1 for part in node.walk()):
        return Node("list", tuple(_with_signs(node, (sign,) * signs) for sign in (1, -1)), "and")
    found = [_with_signs(node, chosen) for chosen in product((1, -1), repeat=signs)]
    # Sums of equal numbers, as in \pm1\pm1, have fewer values than choices of signs.
    distinct = {_key(each): each for each in found} if signs > 1 else dict(enumerate(found))
    return Node("list", tuple(distinct.values()), "and")


def _formulas_meant(node: Node) -> tuple[Node, ...]:
    formulas = both_signs(node)
    # A list within a list stays one item: x < 1 or (y > 2 and z < 3).
    return formulas.parts if formulas.kind == "list" and node.kind != "list" else (formulas,)


def _key(node: Node) -> Node | Fraction:
    value = exact(node)
    return node if value is None else value


def _count_signs(node: Node) -> int:
    counts = [_count_signs(part) for part in node.parts]
    return max(counts) if node.kind == "relation" else sum(counts) + (node.kind == "sign")


def _with_signs(node: Node, signs: Sequence[int]) -> Node:
    r"""Return the formula with each \pm and \mp replaced by one of `signs`, in order (1 or -1)."""
    if node.kind == "sign":
        inner = _with_signs(node.parts[0], signs[1:])
        return inner if node.value == signs[0] else negative(inner)
    parts: list[Node] = []
    for part in node.parts:
        parts.append(_with_signs(part, signs))
        if node.kind != "relation":
            signs = signs[_count_signs(part) :]
    return Node(node.kind, tuple(parts), node.value) if parts else node


def _is_equation(node: Node) -> bool:
    return node.kind == "relation" and set(node.value) == {"="}


def _is_arithmetic(node: Node) -> bool:
    return set(node.value) <= INEQUALITIES | {"="}


def _steps(node: Node) -> list[tuple[Node, str]]:
    """Return a chain of inequalities as (difference, sign) pairs. Each difference must be below, or at most, zero."""
    found = []
    for left, sign, right in zip(node.parts, node.value, node.parts[1:], strict=False):
        if sign in (">", ">="):
            left, right, sign = right, left, _FLIPPED[sign]
        found.append((joined("sum", [left, negative(right)]), sign))
    # A descending chain is reversed, so that equal chains have equal order.
    return found if node.value[0] in ("<", "<=", "=", "!=") else found[::-1]


def _determines(left: Node, right: Node, difference: Node) -> bool:
    """Return whether `left = right` is the only solution of `difference = 0`. The equation is linear in the symbol
    `left`.
    """
    if left.kind != "symbol" or left.value in right.symbols() or left.value not in difference.symbols():
        return False
    zero = number(0)
    if not same_value(replaced(difference, left, right), zero):
        return False
    # An equal, non-zero slope between three points means linear.
    at = [replaced(difference, left, number(point)) for point in (1, 2, 3)]
    slope = joined("sum", [at[1], negative(at[0])])
    return same_value(slope, joined("sum", [at[2], negative(at[1])])) and not same_value(slope, zero)


def _operands(node: Node, sign: str) -> list[Node]:
    if node.kind != "setop" or node.value != sign:
        return [node]
    return [operand for part in node.parts for operand in _operands(part, sign)]


def _is_number_set(node: Node) -> bool:
    if node.kind == "sum" and node.parts[0] == symbol("mathbbR"):
        return True
    return node.kind in ("setop", "builder") or node in (symbol("mathbbR"), EMPTY_SET)


def _without_point_name(node: Node) -> Node:
    """Return only the coordinates of a point with a name, as in `A(3,4)`; other formulas unchanged."""
    is_point = node.kind == "product" and len(node.parts) == 2 and node.parts[1].kind == "tuple"
    return node.parts[1] if is_point and _is_choice(node.parts[0]) else node


def _without_sign_of_approximation(node: Node) -> Node:
    r"""Return `\approx 5` as 5 and `x \approx 5` as x = 5: the value must still be the same exactly."""
    if node.kind != "relation" or node.value != ("approx",):
        return node
    name, value = node.parts
    if name == BLANK:
        return value
    return Node("relation", node.parts, ("=",)) if is_label(name) else node


def _same_numeral(gold: Node, predicted: Node) -> bool:
    """Return whether an answer is the gold number in its base, with or without the base."""
    if gold.kind == "negative":
        return _same_numeral(gold.parts[0], negative(predicted))
    if predicted.kind == "numeral":
        return gold == predicted
    return predicted.kind == "number" and str(predicted.value) == gold.value


def _is_either(node: Node) -> bool:
    return node.kind == "list" and node.value == "or"


def _has_statements(node: Node) -> bool:
    """Return whether a list has conditions, choices or propositions instead of values."""
    if node.kind != "list":
        return False
    is_propositions = all(part.kind in ("symbol", "list") or part.value == "not" for part in node.parts)
    return is_propositions or any(part.kind in ("relation", "list") or _is_choice(part) for part in node.parts)


def _is_condition(node: Node) -> bool:
    """Return whether a list consists of relations that are not all equations."""
    if node.kind != "list" or not all(part.kind == "relation" or _is_condition(part) for part in node.parts):
        return False
    return not all(_is_equation(part) for part in node.parts)


def _renamed(node: Node, old: Node, new: Node) -> Node:
    """Return the formula with a variable renamed, unless the new name has another meaning in it."""
    return node if new.value in node.symbols() else replaced(node, old, new)


def _with_argument_of(function: Node, predicted: Node, value: Node) -> tuple[Node, Node]:
    """Return a predicted definition f(t) = ... with the argument of `function`: f(x) = ..."""
    is_definition = function.kind == predicted.kind == "apply" and len(function.parts) == len(predicted.parts) == 1
    if not is_definition or {part.kind for part in (*function.parts, *predicted.parts)} != {"symbol"}:
        return predicted, value
    old, new = predicted.parts[0], function.parts[0]
    return _renamed(predicted, old, new), _renamed(value, old, new)


def _without_rounding(node: Node) -> Node:
    r"""Return the formula without a decimal approximation after it, if within 1 %: `\frac16 \approx 0.1667`."""
    if node.kind != "relation" or node.value[-1] != "approx" or not set(node.value[:-1]) <= {"="}:
        return node
    exact_part, rounded = node.parts[-2:]
    if BLANK in node.parts or is_label(exact_part) or not is_within_percent(exact_part, rounded):
        return node
    return Node("relation", node.parts[:-1], node.value[:-1]) if len(node.parts) > 2 else exact_part


def _is_choice(node: Node) -> bool:
    return node.kind == "symbol" and len(node.value) == 1 and node.value.isupper()


def _as_quotient(node: Node) -> Node | None:
    if node.kind != "ratio":
        return node
    return Node("quotient", node.parts) if len(node.parts) == 2 else None


def _with_matrix(node: Node) -> Node:
    """Return a product of numbers and a matrix as one matrix, with each entry multiplied."""
    if node.kind == "negative" and node.parts[0].kind == "matrix":
        return _scaled(node.parts[0], [number(-1)])
    if node.kind != "product":
        return node
    matrices = [part for part in node.parts if part.kind == "matrix"]
    return _scaled(matrices[0], [part for part in node.parts if part.kind != "matrix"]) if len(matrices) == 1 else node


def _scaled(matrix: Node, factors: list[Node]) -> Node:
    if matrix.value != "matrix":
        return joined("product", [*factors, matrix])
    rows = [
        Node("row", tuple(joined("product", [*factors, cell]) for cell in row.parts), row.value) for row in matrix.parts
    ]
    return Node("matrix", tuple(rows), matrix.value)


def _degrees(node: Node) -> Node | None:
    r"""Return the number of degrees in a formula like `90^\circ`. None: the formula is not in degrees."""
    if node.kind == "negative":
        inner = _degrees(node.parts[0])
        return inner and negative(inner)
    if node.kind != "product" or DEGREE not in node.parts:
        return None
    # The degree sign alone is one degree.
    return joined("product", [part for part in node.parts if part != DEGREE] or [number(1)])


def _with_constant_of(gold: Node, predicted: Node) -> Node:
    """Return the prediction with its constant of integration renamed to the gold answer's: `x^2+c` becomes `x^2+C`."""
    if gold.kind != "sum" or predicted.kind != "sum":
        return predicted
    constant = next((symbol(name) for name in ("C", "c") if symbol(name) in gold.parts), None)
    if constant is None or constant in predicted.parts:
        return predicted
    # In ax^2 + bx + c the last letter is a coefficient.
    names = _CONSTANTS_OF_INTEGRATION if constant == symbol("C") else () if gold.symbols() & {"a", "b"} else ("C",)
    for name in names:
        if symbol(name) in predicted.parts and name not in gold.symbols():
            return replaced(predicted, symbol(name), constant)
    return predicted
