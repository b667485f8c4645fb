"""Reward for the format of a completion alone; the answer is not judged."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from megarl.rewards.functions.final_answers import answering_text, has_valid_tags, last_boxed
from megarl.rewards.functions.function_score import FunctionScore
from megarl.thoughts import without_thoughts

Form = Literal["think_answer_tags", "boxed", "code", "hashes"]

_FORMS: dict[str, Callable[[str], bool]] = {
    "think_answer_tags": has_valid_tags,
    "boxed": lambda text: last_boxed(without_thoughts(text)) is not None,
    "code": lambda text: re.search(r"```[^\n`]*\n.*?\n?```", without_thoughts(text), re.DOTALL) is not None,
    "hashes": lambda text: re.search(r"^####[ \t]*\S", without_thoughts(text), re.MULTILINE) is not None,
}


def answer_format(
    completion_text: str,
    *,
    in_thoughts: bool = False,
    form: Form | None = None,
    pattern: str | None = None,
    valid_score: float = 1.0,
    invalid_score: float = 0.0,
) -> FunctionScore:
    """Score whether a completion has an answer in a `form`, and matches the regular expression `pattern` as a whole.

    Either may be left out. In `pattern`, `.` also matches line ends. An answer inside thoughts has no form. The answer
    itself is not judged. Metric: `valid`, the share of completions in the format.
    """
    if form is None and pattern is None:
        raise ValueError(f"kwargs.form and kwargs.pattern are missing: set one; form is one of {', '.join(_FORMS)}")
    if form is not None and form not in _FORMS:
        raise ValueError(f"kwargs.form = {form!r}: is not an answer form; set it to one of {', '.join(_FORMS)}")
    is_valid = form is None or _FORMS[form](answering_text(completion_text, in_thoughts=in_thoughts))
    if is_valid and pattern is not None:
        is_valid = re.fullmatch(pattern, completion_text, re.DOTALL) is not None
    score = valid_score if is_valid else invalid_score
    return FunctionScore(score, format_valid=is_valid, metrics={"valid": float(is_valid)})
