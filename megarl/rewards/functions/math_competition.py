"""Reward for the final answer to a problem of a mathematical competition."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from megarl.rewards.functions.final_answers import (
    MATH_COMPETITION_FORMS,
    answering_text,
    gold_answers,
    read_competition_answer,
)
from megarl.rewards.maths.agreement import agreement
from megarl.types import Reward

Form = Literal["boxed", "answer_line", "tags"]

_LEVEL = re.compile(r"(?:level\s*)?(\d{1,2})", re.IGNORECASE)


def math_competition(
    completion_text: str,
    answer: Any,
    record: Mapping[str, Any],
    *,
    in_thoughts: bool = False,
    correct_score: float = 1.0,
    wrong_score: float = 0.0,
    invalid_score: float = 0.0,
    forms: tuple[Form, ...] | list[Form] = MATH_COMPETITION_FORMS,
    thoughts: Literal["optional", "required"] = "optional",
) -> Reward:
    r"""Score the final answer by one of three levels: right, wrong, or invalid format.

    The answer is taken after the last </think>, from the last of these `forms`: \boxed{}, a line `Answer: x`, or
    <answer> tags. Without any form the format is invalid. If `thoughts` are required, a completion without </think>
    has an invalid format too. A completion ending inside its thoughts has no answer. The gold answer may be a list,
    with or without boxes: one equal gold answer is enough. An answer equal only as text earns the mean of
    `correct_score` and `wrong_score`. Metric: `level_N`, the share of right answers by the record's `level` (`Level 5`
    in MATH).

    verl's and slime's math_dapo: wrong_score and invalid_score -1, forms [answer_line]. DeepScaleR: thoughts required.
    """
    if not forms or set(forms) - set(get_args(Form)):
        raise ValueError(f"kwargs.forms = {forms!r}: is not a valid list; list some of {', '.join(get_args(Form))}")
    if thoughts not in ("optional", "required"):
        raise ValueError(f"kwargs.thoughts = {thoughts!r}: is not a valid value; set it to optional or required")
    golds = gold_answers(answer)
    text = answering_text(completion_text, in_thoughts=in_thoughts)
    prediction = read_competition_answer(text, record, forms=forms, thoughts=thoughts)
    share = 0.0 if prediction is None else max(agreement(prediction, gold) for gold in golds)
    level = _level(record)
    metrics = {} if level is None else {f"level_{level}": float(share > 0)}
    if prediction is None:
        return Reward(invalid_score, format_valid=False, answer_correct=False, metrics=metrics)
    score = wrong_score + share * (correct_score - wrong_score)
    return Reward(score, format_valid=True, answer_correct=share > 0, metrics=metrics)


def _level(record: Mapping[str, Any]) -> int | None:
    match = _LEVEL.fullmatch(str(record.get("level", "")).strip())
    return int(match[1]) if match else None
