"""Reward for reasoning in <think> tags and an answer in <answer> tags."""

from __future__ import annotations

from megarl.rewards.final_answers import answering_text, has_valid_tags, last_tagged
from megarl.rewards.math_equivalence import agreement
from megarl.types import Reward


def think_answer_tags(
    completion_text: str, answer: str, *, in_thoughts: bool = False, correct_score: float = 1.0
) -> Reward:
    """Score the last <answer>...</answer> of the completion against the gold answer.

    The format is valid if each of the four tags occurs exactly once, in order, and the completion ends with </answer>.
    An invalid format scores zero. Otherwise the right answer scores `correct_score`, one equal only as text half of it.
    `answer_correct` ignores the format, except that a completion ending inside its thoughts has no answer.
    """
    text = answering_text(completion_text, in_thoughts=in_thoughts)
    format_valid = has_valid_tags(text)
    prediction = last_tagged(text)
    agreed = 0.0 if prediction is None else agreement(prediction, answer)
    score = agreed * correct_score if format_valid else 0.0
    return Reward(score=score, format_valid=format_valid, answer_correct=agreed > 0)
