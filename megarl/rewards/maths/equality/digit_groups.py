"""Comparison of clock times, dates, ranges and codes: numbers joined by signs that are not arithmetic.

The same text may also be a formula: 3:10 may be a time or a ratio, 10-2 a range or a difference. So a comparison has
three results: equal, different, or None (compare them as formulas).
"""

from __future__ import annotations

from fractions import Fraction

from megarl.rewards.maths.equality.exact import exact
from megarl.rewards.maths.formulas.nodes import Node, join_operands, negative

_DATE_PARTS = 3


def compare_digit_groups(gold: Node, prediction: Node) -> bool | None:
    """Return whether two answers are the same time, date, range or code. None: compare them as formulas."""
    if gold.kind == "clock":
        if prediction.kind == "clock":
            return _have_same_time(gold, prediction)
        # 12:30 is not in lowest terms, so it is hardly a ratio.
        return None if _may_be_ratio(gold) and not _is_written_with_colon(prediction) else False
    if gold.kind == "groups":
        is_range = prediction.kind == "ratio" and prediction.value == "to"
        return (prediction.kind == "groups" or is_range) and _have_same_groups(gold, prediction)
    if prediction.kind == "clock":
        return None if gold.kind == "ratio" and not prediction.value else False
    if prediction.kind == "groups":
        return None if _is_falling_pair(prediction) else False
    return None


def as_formula(node: Node) -> Node:
    """Return a time as a ratio, and a falling pair like `10-2` as a difference; other formulas unchanged."""
    if node.kind == "clock" and not node.value:
        return Node("ratio", node.parts)
    if node.kind == "groups" and _is_falling_pair(node):
        larger, smaller = node.parts
        return join_operands("sum", [larger, negative(smaller)])
    return node


def _is_falling_pair(groups: Node) -> bool:
    is_pair = _find_sign_of_groups(groups) == "-" and len(groups.parts) == 2
    return is_pair and groups.parts[0].value >= groups.parts[1].value


def _may_be_ratio(clock: Node) -> bool:
    """Return whether a time may also be a ratio in lowest terms, like 3:10."""
    parts = [exact(part) or Fraction(0) for part in clock.parts]
    if clock.value or len(parts) != 2 or parts[1] < 10:
        return False
    return (parts[0] / parts[1]).denominator == parts[1]


def _is_written_with_colon(node: Node) -> bool:
    return node.kind == "ratio" and node.value != "to"


def _have_same_time(gold: Node, prediction: Node) -> bool:
    if _count_seconds(gold, gold.value) == _count_seconds(prediction, prediction.value):
        return True
    # Where only one has AM or PM, the other hour may count from midnight as above, or be the written one.
    has_one_meridiem = bool(gold.value) != bool(prediction.value)
    return has_one_meridiem and _count_seconds(gold, "") == _count_seconds(prediction, "")


def _count_seconds(clock: Node, meridiem: str) -> Fraction:
    """Return the seconds since midnight, or since the written hour 0 if `meridiem` is not AM or PM."""
    hour, minute, second = ([part.value for part in clock.parts] + [Fraction(0)] * 2)[:3]
    if meridiem and hour <= 12:
        hour = hour % 12 + (12 if meridiem == "PM" else 0)
    return hour * 3600 + minute * 60 + second


def _have_same_groups(gold: Node, prediction: Node) -> bool:
    if len(gold.parts) != len(prediction.parts):
        return False
    # A date may be written with either sign, but 10-12 is not 10/12.
    if _find_sign_of_groups(gold) != _find_sign_of_groups(prediction) and len(gold.parts) != _DATE_PARTS:
        return False
    return _list_comparable_groups(gold) == _list_comparable_groups(prediction)


def _find_sign_of_groups(node: Node) -> str:
    """Return the character between the groups of digits. A range in words, `10 to 12`, counts as 10-12."""
    return node.value[0] if node.kind == "groups" else "-"


def _list_comparable_groups(node: Node) -> list[str | Fraction]:
    """Return the groups by value, so that 03 is 3. Longer groups with a leading zero (phone numbers) remain text."""
    if node.kind != "groups":
        return [part.value for part in node.parts]
    _, *texts = node.value
    return [
        text if text[0] == "0" and len(text) > 2 and "." not in text else part.value
        for text, part in zip(texts, node.parts, strict=True)
    ]
