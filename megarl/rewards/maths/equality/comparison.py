"""Equality of two parsed answers: numbers, formulas, equations, pairs, lists, sets, matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from megarl.rewards.maths.equality.cases import same_cases
from megarl.rewards.maths.equality.digit_groups import as_formula, compare_digit_groups
from megarl.rewards.maths.equality.equations import Step, determines, list_steps
from megarl.rewards.maths.equality.exact import exact
from megarl.rewards.maths.equality.kinds import (
    has_statements,
    is_alternative,
    is_arithmetic,
    is_condition,
    is_equation,
    is_number_set,
)
from megarl.rewards.maths.equality.labels import (
    are_coordinates,
    are_numbered,
    assignments,
    has_other_domain,
    in_order,
    is_label,
    is_of_other_variable,
    may_be_asked_for,
    same_label,
    solutions,
    with_shared_relation,
    without_domain,
)
from megarl.rewards.maths.equality.matching import match_in_any_order
from megarl.rewards.maths.equality.matrices import are_matrices, same_matrices
from megarl.rewards.maths.equality.number_sets import same_set
from megarl.rewards.maths.equality.plus_minus import expand_signs
from megarl.rewards.maths.equality.rewrites import (
    adopt_argument,
    adopt_constant,
    as_congruence,
    as_equation,
    as_quotient,
    column_as_point,
    count_degrees,
    drop_point_name,
    drop_rounding,
    drop_sign_of_approximation,
    join_intervals,
    multiply_into_matrix,
    rename_variable,
    rows_as_matrix,
)
from megarl.rewards.maths.equality.values import is_proportional, same_value
from megarl.rewards.maths.formulas.nodes import BLANK, INFINITY, Node, join_operands, negative, symbol

MAX_MATCHED = 40
"""Maximum length of lists compared in any order, in quadratic time. Longer lists are compared in order."""
_DOTS = symbol("ldots")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of a predicted with a gold answer. `factor` converts predicted numbers to the gold's unit.

    One class has all rules, because they call each other: parts of an answer are compared like whole answers (`same`).
    """

    factor: Fraction = Fraction(1)

    def same(self, gold: Node, prediction: Node) -> bool:
        """Return whether two formulas are the same answer, after rewriting both to a common form."""
        gold, domain = without_domain(gold)
        prediction, predicted_domain = without_domain(drop_rounding(prediction))
        if has_other_domain(gold, domain, prediction, predicted_domain):
            return False
        if domain is not None and predicted_domain is not None:
            prediction = rename_variable(prediction, predicted_domain.parts[0], domain.parts[0])
        gold = with_shared_relation(expand_signs(as_equation(drop_sign_of_approximation(gold))))
        prediction = with_shared_relation(expand_signs(as_equation(drop_sign_of_approximation(prediction))))
        if gold == prediction and self.factor == 1:
            return True
        # Parts of relations, lists and sets are compared one by one below.
        if not {gold.kind, prediction.kind} & {"relation", "list", "set"}:
            digits_agree = compare_digit_groups(gold, prediction)
            if digits_agree is not None:
                return digits_agree
            gold, prediction = as_formula(gold), as_formula(prediction)
        if gold.kind == "numeral" or (gold.kind == "negative" and gold.parts[0].kind == "numeral"):
            return _same_numeral(gold, prediction)
        if "congruence" in (gold.kind, prediction.kind):
            gold, prediction = as_congruence(gold, domain), as_congruence(prediction, predicted_domain)
            return gold.kind == prediction.kind and self._same_congruence(gold, prediction)
        names_agree = self._compare_named(gold, prediction)
        if names_agree is not None:
            return names_agree
        gold_name, gold = solutions(gold)
        predicted_name, prediction = solutions(prediction)
        # x = 5 and y = 5 are different answers. A name in one of them only is ignored.
        if gold_name and predicted_name and not same_label(gold_name, predicted_name):
            return False
        for name in (gold_name, predicted_name):
            if name is not None and name.kind == "tuple" and gold_name != predicted_name and not are_coordinates(name):
                return False
        if any(node.kind == "relation" or is_condition(node) for node in (gold, prediction)):
            return self._compare_relations(gold, prediction)
        return self._compare_values(gold, prediction)

    def _compare_named(self, gold: Node, prediction: Node) -> bool | None:
        """Return whether values with names, as in `x=1, y=2`, agree. None: neither answer has names."""
        golds, predictions = assignments(gold), assignments(prediction)
        if golds and predictions:
            return golds.keys() == predictions.keys() and all(
                self.same(golds[name], predictions[name]) for name in golds
            )
        if golds:
            return self._compare_with_tuple(golds, prediction, self.same)
        if predictions:
            return self._compare_with_tuple(predictions, gold, lambda value, part: self.same(part, value))
        return None

    def _compare_with_tuple(
        self, values: Mapping[str, Node], answer: Node, is_same: Callable[[Node, Node], bool]
    ) -> bool | None:
        """Return whether a tuple (1, 2) gives the values of x=1, y=2, in the order of their names.

        None: `answer` is not a tuple of this length.
        """
        if answer.kind == "set" and len(answer.parts) == 1:
            answer = answer.parts[0]
        if answer.kind == "list" and answer.value != "or" and are_numbered(values) and len(answer.parts) == len(values):
            return all(is_same(values[name], part) for name, part in zip(in_order(values), answer.parts, strict=True))
        if answer.kind in ("list", "set"):
            return False
        if answer.kind != "tuple" or answer.value != "()" or len(answer.parts) != len(values):
            return None
        return all(is_same(values[name], part) for name, part in zip(in_order(values), answer.parts, strict=True))

    def _compare_relations(self, gold: Node, prediction: Node) -> bool:
        """Return whether two answers agree, of which one or both are relations, such as x = 3 and 3."""
        verdict = same_set(gold, prediction)
        # 2x = 6 and x = 3 have one set of solutions, but are not the same equation.
        if verdict is not None and not is_equation(gold):
            return verdict
        if gold.kind == "list" or prediction.kind == "list":
            return self._same_lists(gold, prediction)
        if gold.kind == prediction.kind == "relation":
            return self._same_relation(gold, prediction)
        if gold.kind == "relation":
            if gold.value == ("in",):
                return self._same_members(gold, prediction)
            return is_equation(gold) and is_label(gold.parts[0]) and self.same(gold.parts[-1], prediction)
        if prediction.value == ("in",):
            return self._same_members(prediction, gold)
        return is_equation(prediction) and self._names_or_holds(gold, prediction.parts)

    def _same_members(self, relation: Node, answer: Node) -> bool:
        r"""Return whether an answer is the set of a relation: `x \in A` and A alone are the same.

        A column is no set: after `x \in`, (1, 2) is an interval.
        """
        element, members = relation.parts
        is_set = multiply_into_matrix(answer).kind != "matrix"
        return (element.kind == "symbol" or are_coordinates(element)) and is_set and self.same(members, answer)

    def _same_lists(self, gold: Node, prediction: Node) -> bool:
        r"""Compare two answers, of which one or both are lists.

        Two lists are compared item by item. A list next to an equation is compared with the equation's last side:
        `1, 2` equals `x = 1, 2`. A list next to `x \in \{1, 2\}` is compared with the set.
        """
        if gold.kind == prediction.kind == "list":
            return self._same_items(gold, prediction)
        for relation, values in ((gold, prediction), (prediction, gold)):
            if relation.kind == "relation" and relation.value == ("in",):
                # `x \in \{1, 2\}` lists values, but `x \in (1, 2)` is an interval.
                return relation.parts[1].kind == "set" and self._same_members(relation, values)
        if gold.kind == "relation" and is_equation(gold) and is_label(gold.parts[0]):
            return self.same(gold.parts[-1], prediction)
        return is_equation(prediction) and is_label(prediction.parts[0]) and self.same(gold, prediction.parts[-1])

    def _names_or_holds(self, gold: Node, parts: Sequence[Node]) -> bool:
        """Return whether a predicted equation assigns the gold value to a name (`x = 5`) or computes it (`2+3 = 5`)."""
        # An expression of several variables does not determine one of them, so its value is the answer.
        if not gold.symbols() and may_be_asked_for(parts[0]):
            return all(self.same(gold, value) for value in parts[1:])
        if any(is_label(part) and is_of_other_variable(part, gold) for part in parts):
            return False
        values = [part for part in parts if not is_label(part)]
        # With two names or more, the gold answer must be a symbol itself: y = x.
        if len(values) < len(parts) - 1:
            return gold.kind == "symbol" and self.same(gold, parts[-1])
        is_named = len(values) == len(parts) or is_label(parts[0]) or is_label(parts[-1])
        return is_named and all(self.same(gold, value) for value in values)

    def _same_relation(self, gold: Node, prediction: Node) -> bool:
        # Relations such as "subset" have no arithmetic, so compare them part by part.
        if BLANK in gold.parts or BLANK in prediction.parts or not is_arithmetic(gold) or not is_arithmetic(prediction):
            is_alike = gold.value == prediction.value and len(gold.parts) == len(prediction.parts)
            return is_alike and all(map(self.same, gold.parts, prediction.parts))
        if is_equation(gold) and is_equation(prediction):
            return self._same_equation(gold, prediction)
        # Bring each step to the form "difference < 0". Equal up to positive factors then means equivalent.
        gold_steps, steps = list_steps(gold), list_steps(prediction)
        return len(gold_steps) == len(steps) and all(map(_is_same_step, gold_steps, steps))

    def _same_equation(self, gold: Node, prediction: Node) -> bool:
        """Return whether two equations are the same. Three cases:

        Equal right sides follow the same label (`x =`, `f(x) =`); one equation is solved for a variable of the other;
        or one is a multiple of the other.
        """
        left, right = _with_label_first(gold)
        predicted_left, predicted_right = adopt_argument(left, *_with_label_first(prediction))
        has_labels = is_label(left) and is_label(predicted_left) and same_label(left, predicted_left)
        if has_labels and self.same(right, predicted_right):
            return True
        is_chain = len(gold.parts) > 2 or len(prediction.parts) > 2
        # x = 5 has a single solution, so a multiple such as 2x = 10 must not match it by proportion.
        is_value = is_label(left) and not right.symbols()
        if is_chain or is_value:
            return False
        difference = join_operands("sum", [left, negative(right)])
        predicted_difference = join_operands("sum", [predicted_left, negative(predicted_right)])
        # Either side may be solved for a variable: y = 2x + 1 and 2x - y + 1 = 0.
        is_solved = determines(left, right, predicted_difference)
        is_solved = is_solved or determines(predicted_left, predicted_right, difference)
        return is_solved or is_proportional(difference, predicted_difference) != 0

    def _compare_values(self, gold: Node, prediction: Node) -> bool:
        """Return whether two values agree: sets, lists, tuples, matrices, ratios or formulas."""
        # The intervals of a union may be joined by words.
        if gold.kind == "setop" and gold.value == "cup":
            prediction = join_intervals(prediction)
        # A union or condition makes both sides sets, even if the other one looks like a tuple.
        if any(is_number_set(node) for node in (gold, prediction)):
            return self._same_sets(gold, prediction)
        if gold.kind in ("list", "set") and prediction.kind in ("list", "set"):
            return self._same_items(gold, prediction)
        if gold.kind == "matrix" and prediction.kind == "tuple":
            prediction = rows_as_matrix(prediction)
        # A set of one point equals the point.
        if {gold.kind, prediction.kind} == {"set", "tuple"}:
            (elements,) = (node.parts for node in (gold, prediction) if node.kind == "set")
            if len(elements) == 1 and elements[0].kind == "tuple":
                return self.same(*(elements[0] if node.kind == "set" else node for node in (gold, prediction)))
        if gold.kind == "tuple" or prediction.kind == "tuple":
            return self._same_tuples(column_as_point(gold, prediction), column_as_point(prediction, gold))
        # A set of one element equals the element.
        if gold.kind == "set" or prediction.kind == "set":
            golds, predictions = (node.parts if node.kind == "set" else (node,) for node in (gold, prediction))
            return len(golds) == len(predictions) == 1 and self.same(golds[0], predictions[0])
        gold, prediction = multiply_into_matrix(gold), multiply_into_matrix(prediction)
        if are_matrices(gold, prediction):
            return self.factor == 1 and same_matrices(gold, prediction)
        if "matrix" in (gold.kind, prediction.kind):
            is_alike = (gold.kind, gold.value, len(gold.parts)) == (
                prediction.kind,
                prediction.value,
                len(prediction.parts),
            )
            if is_alike and gold.kind == "matrix" and gold.value == "cases":
                return same_cases(gold, prediction, self._same_row)
            return is_alike and all(map(self._same_row, gold.parts, prediction.parts))
        if "ratio" in (gold.kind, prediction.kind):
            return self._same_ratio(gold, prediction)
        return self._same_expression(gold, prediction)

    def _same_row(self, gold: Node, prediction: Node) -> bool:
        if gold.kind != "row" or prediction.kind != "row":
            return self.same(gold, prediction)
        return len(gold.parts) == len(prediction.parts) and all(map(self.same, gold.parts, prediction.parts))

    def _same_sets(self, gold: Node, prediction: Node) -> bool:
        verdict = same_set(gold, prediction)
        if verdict is not None:
            return verdict
        if gold.kind != prediction.kind or gold.value != prediction.value:
            return False
        if gold.kind == "setop" and gold.value in ("cup", "cap"):
            return self._match_items(_operands(gold, gold.value), _operands(prediction, gold.value))
        return all(map(self.same, gold.parts, prediction.parts))

    def _same_items(self, gold: Node, prediction: Node) -> bool:
        # The word between values does not matter. It does between choices, "A or B", and between conditions.
        if is_alternative(gold) != is_alternative(prediction) and (has_statements(gold) or has_statements(prediction)):
            return False
        golds, predictions = gold.parts, prediction.parts
        # Equations are not values. Bare values may only answer gold equations of one name: 1, 2 for x = 1, x = 2.
        num_names = len({part.parts[0] for part in golds if is_equation(part)})
        has_named_prediction = any(map(is_equation, predictions))
        if (has_named_prediction and num_names == 0) or (not has_named_prediction and num_names > 1):
            return False
        # With dots the order matters: 1, 2, 3, ... is a sequence.
        if _DOTS in golds or _DOTS in predictions:
            return len(golds) == len(predictions) and all(map(self.same, golds, predictions))
        if "set" in (gold.kind, prediction.kind):
            golds, predictions = self._drop_repetitions(golds), self._drop_repetitions(predictions)
        return self._match_items(golds, predictions)

    def _drop_repetitions(self, parts: Sequence[Node]) -> list[Node]:
        distinct: list[Node] = []
        for part in parts[:MAX_MATCHED]:
            if not any(Comparison().same(part, element) for element in distinct):
                distinct.append(part)
        return [*distinct, *parts[MAX_MATCHED:]]

    def _match_items(self, golds: Sequence[Node], predictions: Sequence[Node]) -> bool:
        if len(golds) != len(predictions):
            return False
        if len(golds) > MAX_MATCHED:
            return all(map(self.same, golds, predictions))
        return match_in_any_order(golds, predictions, self.same)

    def _same_tuples(self, gold: Node, prediction: Node) -> bool:
        prediction = drop_point_name(prediction)
        # A list without brackets may be a tuple, except with infinity: that is an interval.
        if prediction.kind == "list" and prediction.value == "," and gold.value == "()" and INFINITY not in gold.walk():
            prediction = Node("tuple", prediction.parts, "()")
        if gold.kind != "tuple" or prediction.kind != "tuple" or gold.value != prediction.value:
            return False
        return len(gold.parts) == len(prediction.parts) and all(map(self.same, gold.parts, prediction.parts))

    def _same_ratio(self, gold: Node, prediction: Node) -> bool:
        if gold.kind == prediction.kind == "ratio":
            return self._is_proportion(gold.parts, prediction.parts)
        # 48 to 1 is not 48.
        if any(node.value == "to" for node in (gold, prediction)) and "number" in (gold.kind, prediction.kind):
            return False
        if any(exact(part) == 0 for node in (gold, prediction) if node.kind == "ratio" for part in node.parts):
            return False
        gold_quotient, quotient = as_quotient(gold), as_quotient(prediction)
        return gold_quotient is not None and quotient is not None and same_value(gold_quotient, quotient)

    def _is_proportion(self, golds: Sequence[Node], predictions: Sequence[Node]) -> bool:
        """Return whether two ratios are proportional. Zeros must stand at the same places."""
        zeros = [exact(part) == 0 for part in golds]
        if zeros != [exact(part) == 0 for part in predictions]:
            return False
        sides = zip(golds, predictions, zeros, strict=True)
        pairs = [(part, predicted_part) for part, predicted_part, is_zero in sides if not is_zero]
        # With one part left there is no proportion: 5:0 is not 7:0.
        if len(pairs) < 2:
            return all(self.same(*pair) for pair in pairs)
        reference_part, predicted_reference = pairs[0]
        # a : b = c : d exactly if a d = b c for all parts.
        return all(
            same_value(
                join_operands("product", [reference_part, predicted_part]),
                join_operands("product", [predicted_reference, part]),
            )
            for part, predicted_part in pairs[1:]
        )

    def _same_congruence(self, gold: Node, prediction: Node) -> bool:
        r"""Return whether two congruences agree: `x \equiv 3 \pmod 7` and `x \equiv 10 \pmod 7` do.

        The left sides and moduli must be equal, and the residues must differ by a multiple of the modulus. `BLANK`, an
        omitted left side, equals any other.
        """
        gold_left, gold_residue, gold_modulus = gold.parts
        left, residue, modulus = prediction.parts
        if BLANK not in (gold_left, left) and not self.same(gold_left, left):
            return False
        if not same_value(gold_modulus, modulus):
            return False
        difference = join_operands("sum", [gold_residue, negative(residue)])
        num_moduli = exact(Node("quotient", (difference, gold_modulus)))
        # None: the residues are not numbers, so they must be equal.
        return num_moduli.denominator == 1 if num_moduli is not None else self.same(gold_residue, residue)

    def _same_expression(self, gold: Node, prediction: Node) -> bool:
        r"""Return whether two formulas have equal values. One of them may lack its degree sign: `90` for `90^\circ`."""
        gold_degrees, predicted_degrees = count_degrees(gold), count_degrees(prediction)
        if (gold_degrees is None) != (predicted_degrees is None):
            side_without_sign = gold if gold_degrees is None else prediction
            # With pi this side is in radians. Otherwise its sign was left out, so compare the numbers of degrees.
            if not any(node.kind == "constant" and node.value == "pi" for node in side_without_sign.walk()):
                gold, prediction = gold_degrees or gold, predicted_degrees or prediction
        return same_value(gold, adopt_constant(gold, prediction), self.factor)


def _operands(node: Node, sign: str) -> list[Node]:
    if node.kind != "setop" or node.value != sign:
        return [node]
    return [operand for part in node.parts for operand in _operands(part, sign)]


def _same_numeral(gold: Node, prediction: Node) -> bool:
    """Return whether an answer is the gold number in its base, with or without the base."""
    if gold.kind == "negative":
        return _same_numeral(gold.parts[0], negative(prediction))
    if prediction.kind == "numeral":
        return gold == prediction
    return prediction.kind == "number" and str(prediction.value) == gold.value


def _is_same_step(gold: Step, prediction: Step) -> bool:
    if gold.sign != prediction.sign:
        return False
    factor_sign = is_proportional(gold.difference, prediction.difference)
    # Relations = and != may also be multiplied by a negative number.
    return factor_sign > 0 or (factor_sign < 0 and gold.sign in ("=", "!="))


def _with_label_first(equation: Node) -> tuple[Node, Node]:
    """Return the first and last side of an equation. 5 = x is read as x = 5."""
    left, right = equation.parts[0], equation.parts[-1]
    return (right, left) if is_label(right) and not is_label(left) else (left, right)
