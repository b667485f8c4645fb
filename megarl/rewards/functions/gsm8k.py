"""Reward for the final number of a grade-school problem (GSM8K)."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal, get_args

from megarl.rewards.functions.final_answers import (
    GSM8K_FORMS,
    MARKED_NUMBER,
    NUMBER,
    answering_text,
    find_last_answer,
    has_valid_tags,
    read_marked_line,
)
from megarl.rewards.maths.quantities import read_quantity
from megarl.rewards.maths.spelling import with_ascii_signs
from megarl.thoughts import without_thoughts
from megarl.types import Reward

Form = Literal["hashes", "boxed", "tags"]

_MAX_CHARACTERS = 100
_ANY_NUMBER = re.compile(rf"(?<![\d.,])({NUMBER})")


def gsm8k(
    completion_text: str,
    answer: Any,
    *,
    in_thoughts: bool = False,
    correct_score: float = 1.0,
    format_score: float = 0.0,
    forms: tuple[Form, ...] | list[Form] = GSM8K_FORMS,
    method: Literal["strict", "flexible"] = "strict",
) -> Reward:
    r"""Score the final number of the completion against the gold number.

    The number is read from the last `#### n`, \boxed{n} or <answer>n</answer>, as far as `forms` lists them. After
    #### the whole line must be a number, optionally with a unit: 3/4, 5 million, 5 apples, but not 10-12. For tags,
    the four tags of `think_answer_tags` must be well-formed. With method flexible (verl's), a completion without any
    form is scored by its last number, but its format is invalid. A number inside thoughts does not count.

    The gold answer is a number, or GSM8K's solution ending with `#### n`. Numbers are equal by value: 1,234 and
    $1234.00. The score is `correct_score` for the right number, `format_score` for a wrong number in one of the forms,
    else zero. Metric: `fallback`, the share of completions scored by their last number. ColossalChat's gsm8k: forms
    [tags], format_score 1, reward.correct_score 10. Raises ValueError for a gold answer that is not a number.
    """
    if method not in get_args(Literal["strict", "flexible"]):
        raise ValueError(f"kwargs.method = {method!r}: is not a valid value; set it to strict or flexible")
    if not forms or set(forms) - set(get_args(Form)):
        raise ValueError(f"kwargs.forms = {forms!r}: is not a valid list; list some of {', '.join(get_args(Form))}")
    gold = gold_number(answer)
    number, format_valid = _read_final_number(
        answering_text(completion_text, in_thoughts=in_thoughts), tuple(forms), method
    )
    is_fallback = number is not None and not format_valid
    is_correct = number == gold
    score = correct_score if is_correct else format_score if format_valid else 0.0
    return Reward(score, format_valid, is_correct, metrics={"fallback": float(is_fallback)})


def gold_number(answer: Any) -> Fraction:
    """Return the number in a gold answer. Raises ValueError if there is none."""
    text = with_ascii_signs(str(answer))
    last_mark = deque(MARKED_NUMBER.finditer(text), maxlen=1)
    number = _read_quantity_text(read_marked_line(text, last_mark[0]) if last_mark else text)
    if number is None:
        raise ValueError(f"the gold answer {text!r:.80} is neither a number nor a text ending with '#### NUMBER'")
    return number


def check_record(answer: Any, record: Mapping[str, Any], **kwargs: Any) -> None:
    """Raise ValueError for a record whose gold answer is not a number."""
    gold_number(answer)


def final_answer(
    text: str,
    record: Mapping[str, Any],
    *,
    forms: tuple[Form, ...] | list[Form] = GSM8K_FORMS,
    method: Literal["strict", "flexible"] = "strict",
    **kwargs: Any,
) -> str | None:
    """Return the final number of a completion as text, like the reward `gsm8k`, or None."""
    number, _ = _read_final_number(answering_text(text), tuple(forms), method)
    return None if number is None else str(number)


def _read_final_number(
    text: str, forms: tuple[Form, ...], method: Literal["strict", "flexible"]
) -> tuple[Fraction | None, bool]:
    """Return the final number of a completion, and whether it is in an answer form such as `#### 42`."""
    text = with_ascii_signs(text)
    number = _read_marked_number(text, forms)
    if number is not None or method == "strict":
        return number, number is not None
    # A deque of one keeps only the last match, so a long text needs no list of all.
    matches = deque(_ANY_NUMBER.finditer(without_thoughts(text)), maxlen=1)
    return (_read_digits(matches[0][1]) if matches else None), False


def _read_marked_number(text: str, forms: tuple[Form, ...]) -> Fraction | None:
    """Return the number in the last answer form. None: no form occurs, or the last one has no number."""
    statement = find_last_answer(without_thoughts(text), forms)
    if statement is None:
        return None
    form, answer = statement
    if form == "tags" and not has_valid_tags(text):
        return None
    return _read_quantity_text(answer)


def _read_quantity_text(text: str) -> Fraction | None:
    """Return the number in a text like `5` or `5 apples`. None: the text has more, like `5 or 6`."""
    text = _without_marks(text.strip())
    # The limit keeps huge numbers and long texts from taking time.
    quantity = read_quantity(text) if len(text) <= _MAX_CHARACTERS else None
    # The number of 2 h 30 min depends on the unit.
    return None if quantity is None or quantity.smallest else quantity.number


def _without_marks(text: str) -> str:
    text = text.removesuffix(".").strip("*_ ").removesuffix(".")
    is_formula = len(text) > 2 and text[0] == text[-1] == "$"
    return text[1:-1].strip().removesuffix(".") if is_formula else text


def _read_digits(text: str) -> Fraction | None:
    digits = re.sub(r"[$,]", "", text)
    return Fraction(digits) if len(digits) <= _MAX_CHARACTERS else None
