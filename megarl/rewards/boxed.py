"""Reward for an answer in \\boxed{}."""

from __future__ import annotations

from megarl.rewards.final_answers import answering_text, last_boxed
from megarl.rewards.math_equivalence import agreement
from megarl.types import Reward


def boxed(completion_text: str, answer: str, *, in_thoughts: bool = False, correct_score: float = 1.0) -> Reward:
    r"""Score the last \boxed{} of the completion against the gold answer.

    The format is valid if the box exists and is closed. The score is `correct_score` for the right answer, and half of
    it for an answer that is equal as text but not parsable as mathematics. It is zero otherwise. A completion that ends
    inside its thoughts has no box.
    """
    prediction = last_boxed(answering_text(completion_text, in_thoughts=in_thoughts))
    if prediction is None:
        return Reward(score=0.0, format_valid=False, answer_correct=False)
    agreed = agreement(prediction, answer)
    return Reward(score=agreed * correct_score, format_valid=True, answer_correct=agreed > 0)
