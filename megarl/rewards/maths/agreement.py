"""Mathematical equivalence of a predicted and a gold answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from fractions import Fraction
from functools import lru_cache

from megarl.rewards.maths.chemistry import is_same_chemical
from megarl.rewards.maths.choice_letters import choice_agreement
from megarl.rewards.maths.equality.comparison import Comparison
from megarl.rewards.maths.equality.matching import match_in_any_order
from megarl.rewards.maths.equality.rewrites import multiply_by_arguments
from megarl.rewards.maths.formulas.nodes import Node, symbol
from megarl.rewards.maths.formulas.parser import parse
from megarl.rewards.maths.quantities import Quantity, read_quantity, same_quantity, without_currency
from megarl.rewards.maths.spelling import (
    MAX_ANSWER_CHARACTERS,
    canonical,
    has_vectors,
    is_same_text,
    is_same_without_stray_braces,
    is_within_caps,
    normalize,
    plain_text,
    with_plain_vectors,
)
from megarl.rewards.maths.units import Unit, read_unit

__all__ = ["agreement", "is_within_caps"]

_NO_WORDS: frozenset[str] = frozenset()
_ITEM_END = re.compile(r"\s*,\s+and\s+|\s+and\s+|\s*[,;]\s+")
_MAX_LIST_CHARACTERS = 200
_IN_BASE = re.compile(r"([0-9][0-9A-F]*|[0-9A-F]{2,}(?=_\{?16\b))_\{?(?:\\text\s*\{)?(?:[0-9]+|[a-z]+)\}*")


def agreement(prediction: str, answer: str) -> float:
    r"""Return 1 if `prediction` equals `answer`, 0.5 if they are equal except for meaningless braces, else 0.

    Both are LaTeX or plain text, with or without \boxed{}. Equal texts agree. Choices are compared by letter, plain
    numbers and quantities exactly. Everything else is parsed and compared by value. If neither can be parsed, or one
    exceeds the limits of size, both are compared as texts, ignoring spaces, meaningless braces and case. An empty
    prediction never agrees.
    """
    # Long answers are hardly ever a formula, and comparing them as one could take long.
    if len(prediction) > MAX_ANSWER_CHARACTERS or len(answer) > MAX_ANSWER_CHARACTERS:
        return float(prediction.split() == answer.split())
    result = _compare_normalised(normalize(prediction), normalize(answer))
    if result == 1.0 or not has_vectors(answer):
        return result
    return max(
        result, _compare_normalised(normalize(with_plain_vectors(prediction)), normalize(with_plain_vectors(answer)))
    )


def _compare_normalised(prediction: str, answer: str) -> float:
    """Return the agreement of two texts in normalised spelling."""
    if not prediction:
        return 0.0
    if canonical(prediction) == canonical(answer):
        return 1.0
    same_choice = choice_agreement(prediction, answer, lambda text, gold_text: agreement(text, gold_text) == 1.0)
    if same_choice is not None:
        return float(same_choice)
    gold_quantity, words = _read_gold_quantity(answer)
    predicted_quantity = read_quantity(prediction, words)
    if predicted_quantity and gold_quantity:
        return float(same_quantity(predicted_quantity, gold_quantity))
    # A gold answer in another base, 1A_{16}, is often answered without naming the base.
    gold_base = _IN_BASE.fullmatch(answer)
    if gold_base and gold_base[1] == prediction:
        return 1.0
    if is_same_chemical(prediction, answer) or _list_same_quantities(prediction, answer):
        return 1.0
    return _compare_formulas(prediction, answer)


def _list_same_quantities(prediction: str, answer: str) -> bool:
    """Return whether two lists of numbers with units agree in any order: `5 cm and 12 cm`."""
    golds = _split_quantities(answer)
    predictions = _split_quantities(prediction) if golds else ()
    if not golds or len(golds) != len(predictions):
        return False
    return match_in_any_order(golds, predictions, lambda gold, quantity: same_quantity(quantity, gold))


# Cached for the gold answers, as below.
@lru_cache(maxsize=256)
def _split_quantities(text: str) -> tuple[Quantity, ...]:
    """Return the quantities of a list, or nothing if it has other items or a number without a unit."""
    # Most answers are no lists, and reading their words takes time.
    may_be_list = len(text) < _MAX_LIST_CHARACTERS and _ITEM_END.search(text) is not None
    items = _ITEM_END.split(plain_text(text)) if may_be_list else []
    quantities = [quantity for item in items if (quantity := read_quantity(item)) is not None and quantity.unit]
    return tuple(quantities) if len(quantities) == len(items) > 1 else ()


def _compare_formulas(prediction: str, answer: str) -> float:
    """Return the agreement of two answers, parsed as formulas: 1, 0, or 0.5 for a difference in stray braces."""
    gold, words = _parse_gold_formula(answer)
    predicted_tree = _parse_formula(prediction, words)
    if gold is None or predicted_tree is None:
        # Both are words or unknown text, so only the spelling can be compared.
        if all(tree is None or _is_word(tree) for tree in (gold, predicted_tree)):
            return float(is_same_text(prediction, answer))
        return 0.5 if predicted_tree is None and is_same_without_stray_braces(prediction, answer) else 0.0
    if gold == predicted_tree:
        return 1.0
    # Numeric evaluation of huge powers or factorials would take too long.
    if not is_within_caps(prediction) or not is_within_caps(answer):
        return 0.0
    if _is_same_with_units(gold, predicted_tree):
        return 1.0
    unitless_tree = predicted_tree if not words else _parse_formula(prediction, _NO_WORDS)
    readings = _other_readings(prediction, answer, gold, unitless_tree)
    return float(any(_is_same_with_units(gold_tree, tree) for gold_tree, tree in readings))


def _is_word(tree: Node) -> bool:
    """Return whether a formula was a word: capitals (YES), or `a cat`, parsed as the number a with the unit cat."""
    if tree.kind == "quantity":
        return tree.parts[0] == symbol("a")
    return tree.kind == "symbol" and len(tree.value) > 1 and tree.value.isupper()


# Many completions are compared with the same gold answer, so its parsed form is cached.
@lru_cache(maxsize=256)
def _read_gold_quantity(answer: str) -> tuple[Quantity | None, frozenset[str]]:
    """Parse a gold answer as a quantity. Returns the quantity or None, and the names of its unit."""
    quantity = read_quantity(answer)
    return quantity, quantity.unit.names if quantity and quantity.unit else _NO_WORDS


@lru_cache(maxsize=256)
def _parse_gold_formula(answer: str) -> tuple[Node | None, frozenset[str]]:
    """Parse a gold answer as a formula. Returns its tree or None, and the names of its unit."""
    tree = _parse_formula(answer, None)
    return tree, tree.value.names if tree is not None and tree.kind == "quantity" else _NO_WORDS


def _parse_formula(text: str, words: Collection[str] | None, *, groups: bool = True) -> Node | None:
    text, currency = without_currency(text)
    tree = parse(text, lambda unit, is_apart: read_unit(unit, words if is_apart else _NO_WORDS), groups=groups)
    return Node("quantity", (tree,), currency) if tree is not None and currency is not None else tree


def _other_readings(prediction: str, answer: str, gold: Node, unitless_tree: Node | None) -> list[tuple[Node, Node]]:
    """Return further pairs of trees (gold, prediction) that the texts may mean.

    A single letter may be a variable instead of a unit. `100,200,300` may be a list if the gold answer is one. `P(2)`
    may be a product. `unitless_tree` is the prediction parsed without the names of the gold answer's unit.
    """
    readings: list[tuple[Node | None, Node | None]] = []
    if any(re.search(r"(?<=\s)[A-Za-z]\b", text) for text in (prediction, answer)):
        readings.append((parse(answer), parse(prediction)))
    if re.search(r"\d,\d{3}", prediction) and re.search(r",\s", answer):
        readings.append((gold, _parse_formula(prediction, _NO_WORDS, groups=False)))
    if "(" in prediction and unitless_tree is not None:
        product = multiply_by_arguments(unitless_tree, gold)
        if product != unitless_tree:
            readings.append((gold, product))
    return [
        (gold_tree, predicted_tree)
        for gold_tree, predicted_tree in readings
        if gold_tree is not None and predicted_tree is not None
    ]


def _is_same_with_units(gold: Node, predicted_tree: Node) -> bool:
    """Return whether two formulas are equal, with the prediction converted to the gold answer's unit.

    A unit in only one of them is ignored, except percent: a predicted 50% means 0.5, and a gold 50% may be written 0.5
    or 50.
    """
    gold, gold_unit = _without_unit(gold)
    predicted_tree, predicted_unit = _without_unit(predicted_tree)
    is_equal: Callable[[Fraction], bool] = lambda factor: Comparison(factor).same(gold, predicted_tree)  # noqa: E731
    # Both with units: convert between units of equal dimensions.
    if gold_unit and predicted_unit:
        # A unit without a name (`12 square units`) has nothing to convert.
        if gold_unit.power_of_any or predicted_unit.power_of_any:
            return gold_unit.may_be(predicted_unit) and is_equal(Fraction(1))
        factor = predicted_unit.factor / gold_unit.factor
        return gold_unit.dimensions == predicted_unit.dimensions and is_equal(factor)
    # A percentage may also be written as its value: 50% and 0.5.
    if predicted_unit and predicted_unit.is_percentage:
        return is_equal(predicted_unit.factor)
    if gold_unit and gold_unit.is_percentage and is_equal(1 / gold_unit.factor):
        return True
    return is_equal(Fraction(1))


def _without_unit(node: Node) -> tuple[Node, Unit | None]:
    return (node.parts[0], node.value) if node.kind == "quantity" else (node, None)
