r"""Rewards for a mathematical answer in a marked place: in \boxed{}, or in <answer> tags."""

from __future__ import annotations

from collections.abc import Callable

from megarl.rewards.functions.final_answers import (
    answering_text,
    final_text,
    has_valid_tags,
    last_boxed,
    last_tagged,
)
from megarl.rewards.maths.agreement import agreement
from megarl.types import Reward


def boxed(completion_text: str, answer: str, *, in_thoughts: bool = False, correct_score: float = 1.0) -> Reward:
    r"""Score the last \boxed{} of the completion against the gold answer.

    The format is valid if the box exists and is closed. The score is `correct_score` for the right answer, and half of
    it for an answer equal as text but not parsable as mathematics. Otherwise it is zero. A box inside thoughts does
    not count.
    """
    text = final_text(completion_text, in_thoughts=in_thoughts)
    return _score_marked_answer(text, answer, last_boxed, lambda text: True, correct_score)


def think_answer_tags(
    completion_text: str, answer: str, *, in_thoughts: bool = False, correct_score: float = 1.0
) -> Reward:
    """Score the last <answer>...</answer> of the completion against the gold answer.

    The format is valid if each of the four tags occurs exactly once, in order, and the completion ends with </answer>.
    An invalid format scores zero. Otherwise the scores are those of `boxed`. `answer_correct` ignores the format, but
    an answer inside unfinished thoughts does not count.
    """
    text = answering_text(completion_text, in_thoughts=in_thoughts)
    return _score_marked_answer(text, answer, last_tagged, has_valid_tags, correct_score)


def _score_marked_answer(
    text: str,
    answer: str,
    read_answer: Callable[[str], str | None],
    is_valid: Callable[[str], bool],
    correct_score: float,
) -> Reward:
    """Score the answer that `read_answer` reads. The format is valid with an answer and a true `is_valid(text)`."""
    prediction = read_answer(text)
    if prediction is None:
        return Reward(0.0, format_valid=False, answer_correct=False)
    share = agreement(prediction, answer)
    format_valid = is_valid(text)
    return Reward(share * correct_score if format_valid else 0.0, format_valid, answer_correct=share > 0)
