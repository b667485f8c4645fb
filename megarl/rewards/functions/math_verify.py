"""Reward by the library math-verify, for comparison with other projects."""

from __future__ import annotations

from typing import Any

from math_verify import parse, verify

from megarl.rewards.functions.final_answers import final_text, gold_texts
from megarl.types import Reward

_NO_TIMEOUT = 0
"""Turns off the timeout of math-verify 0.9: it is an alarm by the clock, so a busy machine would change verdicts. The
reward process has a CPU limit instead (`reward.timeout_seconds`).
"""


def math_verify(completion_text: str, answer: Any, *, in_thoughts: bool = False, correct_score: float = 1.0) -> Reward:
    r"""Score the completion after its thoughts by math-verify's functions `parse` and `verify`.

    All their defaults are kept, except timeouts.

    The format is valid if `parse` returns an answer, even outside \boxed{}. The gold answer is a text, or a list of
    alternatives: one match is enough. `parse` reads the gold answer unchanged. A formula in it needs $ or \boxed{}:
    bare 2\pi is read as 2. If `verify` fails, the answer counts as wrong. A completion ending inside its thoughts has
    no answer. Raises ValueError if nothing can be parsed in one of the gold answers.
    """
    golds = [_parse_gold(text) for text in gold_texts(answer)]
    prediction = parse(final_text(completion_text, in_thoughts=in_thoughts), parsing_timeout=_NO_TIMEOUT)
    is_correct = any(verify(gold, prediction, timeout_seconds=_NO_TIMEOUT) for gold in golds)
    return Reward(correct_score * is_correct, format_valid=bool(prediction), answer_correct=is_correct)


def _parse_gold(text: str) -> list[Any]:
    formulas = parse(text, parsing_timeout=_NO_TIMEOUT)
    if not formulas:
        raise ValueError(
            f"math-verify finds no answer in the gold answer {text!r:.80}; write a formula as $...$ or \\boxed{{...}}"
        )
    return formulas
