"""Comparison of clock times, dates, ranges and codes."""

from __future__ import annotations

from fractions import Fraction

from megarl.rewards.maths.equality.exact import exact
from megarl.rewards.maths.formulas.nodes import Node, joined, negative

_DATE_PARTS = 3


def same_digit_groups(gold: Node, predicted: Node) -> bool | None:
    """Return whether two answers are the same time, date, range or code. None: they are to be compared as formulas."""
    if gold.kind == "clock":
        if predicted.kind == "clock":
            return _same_time(gold, predicted)
        # 3:10 may also be a ratio in lowest terms, which 12:30 is not.
        return None if _may_be_ratio(gold) and not _is_written_with_colon(predicted) else False
    if gold.kind == "groups":
        is_range = predicted.kind == "ratio" and predicted.value == "to"
        return _same_groups(gold, predicted) if predicted.kind == "groups" or is_range else False
    if predicted.kind == "clock":
        return None if gold.kind == "ratio" and not predicted.value else False
    if predicted.kind == "groups" and predicted != _difference(predicted):
        return None
    return False if predicted.kind == "groups" else None


def as_formula(node: Node) -> Node:
    """Return a time as a ratio, and a falling pair such as `10-2` as a difference; other formulas unchanged."""
    if node.kind == "clock" and not node.value:
        return Node("ratio", node.parts)
    return _difference(node) if node.kind == "groups" else node


def _difference(node: Node) -> Node:
    first, *others = node.parts
    is_falling = node.value[0] == "-" and len(others) == 1 and first.value >= others[0].value
    return joined("sum", [first, negative(others[0])]) if is_falling else node


def _may_be_ratio(clock: Node) -> bool:
    parts = [exact(part) or Fraction(0) for part in clock.parts]
    if clock.value or len(parts) != 2 or parts[1] < 10:
        return False
    return (parts[0] / parts[1]).denominator == parts[1]


def _is_written_with_colon(node: Node) -> bool:
    return node.kind == "ratio" and node.value != "to"


def _same_time(gold: Node, predicted: Node) -> bool:
    if _seconds(gold) == _seconds(predicted):
        return True
    # Where only one has AM or PM, the other hour may count from midnight as above, or be the written one.
    is_open = bool(gold.value) != bool(predicted.value)
    return is_open and _seconds(Node("clock", gold.parts, "")) == _seconds(Node("clock", predicted.parts, ""))


def _seconds(clock: Node) -> Fraction:
    hour, minute, second = ([part.value for part in clock.parts] + [Fraction(0)] * 2)[:3]
    if clock.value and hour <= 12:
        hour = hour % 12 + (12 if clock.value == "PM" else 0)
    return hour * 3600 + minute * 60 + second


def _same_groups(gold: Node, predicted: Node) -> bool:
    signs = {node.value[0] if node.kind == "groups" else "-" for node in (gold, predicted)}
    # A date may be written with either sign, but 10-12 is not 10/12.
    if len(gold.parts) != len(predicted.parts) or (len(signs) > 1 and len(gold.parts) != _DATE_PARTS):
        return False
    return _spelled(gold) == _spelled(predicted)


def _spelled(node: Node) -> list[str | Fraction]:
    """Return the groups by value. A longer one with a leading zero, as in a phone number, is returned as written."""
    if node.kind != "groups":
        return [part.value for part in node.parts]
    texts = node.value[1:]
    return [
        text if text[0] == "0" and len(text) > 2 and "." not in text else part.value
        for text, part in zip(texts, node.parts, strict=True)
    ]
