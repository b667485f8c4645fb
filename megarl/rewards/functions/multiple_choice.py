"""Reward for the letter of the right choice in a multiple-choice question."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megarl.rewards.functions.choice_statements import Statement, last_stated_text, last_statement, letter_called_right
from megarl.rewards.functions.choices import LETTERS, Choices, Gold, choices_of, gold_choice
from megarl.rewards.functions.final_answers import answering_text, last_box, last_tags
from megarl.rewards.maths.spelling import with_ascii_signs
from megarl.thoughts import without_thoughts
from megarl.types import Reward

_LABELLED = re.compile(r"(?i:(?:(?:the|my|final|correct)\s+){0,2}(?:answer|choice|option))[\s*_]*[:=](.*)")


def multiple_choice(
    completion_text: str,
    answer: Any,
    record: Mapping[str, Any],
    *,
    in_thoughts: bool = False,
    correct_score: float = 1.0,
    num_choices: int | None = None,
    field: str | None = None,
    gold: Gold | None = None,
) -> Reward:
    """Score the choice named at the completion's end against the gold choice.

    Choices are in the record's `choices` or `options`, or another `field`: a list, {"label": [...], "text": [...]} or
    {"A": ...}. Without them there are `num_choices`, at most 26. The gold answer is a letter or label, a choice's text,
    or its index from 0. `gold` selects one of these three, and is required if an answer is ambiguous.

    Only the completion after its last </think> is read. A completion ending inside its thoughts has no answer. The
    choice is read from the last box or <answer> tags, else from the last `the answer is (B)`, else from a last line
    that is a choice. A statement may also give the choice's text. A choice withdrawn in its line, or joined to a second
    one, counts as none. The format is valid if this place names exactly one choice. Metrics: `chosen_A`, `chosen_B`,
    ...: the share of answers with this letter. Raises ValueError if the gold answer is not a choice or is ambiguous.
    """
    choices = choices_of(record, field, num_choices)
    gold_letter = gold_choice(answer, choices, gold)
    letter = _read_choice(answering_text(completion_text, in_thoughts=in_thoughts), choices)
    # At most 10 letters become metrics, to keep their number small.
    reported_letters = LETTERS[: min(len(choices.labels), 10)] if choices.texts or num_choices else ""
    metrics = {f"chosen_{name}": float(name == letter) for name in reported_letters}
    is_correct = letter == gold_letter
    return Reward(correct_score if is_correct else 0.0, letter is not None, is_correct, metrics=metrics)


def final_answer(
    text: str, record: Mapping[str, Any], *, num_choices: int | None = None, field: str | None = None, **kwargs: Any
) -> str | None:
    """Return the letter of the choice named at a completion's end, like the reward, or None."""
    return _read_choice(answering_text(text), choices_of(record, field, num_choices))


def check_record(
    answer: Any,
    record: Mapping[str, Any],
    *,
    num_choices: int | None = None,
    field: str | None = None,
    gold: Gold | None = None,
    **kwargs: Any,
) -> None:
    """Raise ValueError for a record without choices, or with a gold answer that is no choice."""
    gold_choice(answer, choices_of(record, field, num_choices), gold)


def _read_choice(text: str, choices: Choices) -> str | None:
    """Return the letter of the choice that a completion answers with. None: no choice, or several.

    The first of these in the completion counts: a box or tags, a last line that calls a choice right, a stated answer,
    a last line with only an answer.
    """
    text = with_ascii_signs(without_thoughts(text))
    marked_answers = [match for match in (last_box(text), last_tags(text)) if match is not None]
    if marked_answers:
        return choices.letter(max(marked_answers).text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last_line = lines[-1] if lines else ""
    called_right = letter_called_right(last_line)
    if called_right is not None and called_right in choices.letters:
        return called_right
    statement = last_statement(text, choices.letters)
    if statement is not None:
        return _read_agreeing_letter(statement, choices)
    stated_text = last_stated_text(text)
    if stated_text is not None and (letter := choices.by_own_name(stated_text)) is not None:
        return letter
    label = _LABELLED.fullmatch(last_line)
    letter = choices.letter(label[1] if label else last_line)
    previous_letter = choices.letter(lines[-2]) if len(lines) > 1 else None
    # A choice below the choice before it ends the question's list. It is no answer.
    is_listed = letter is not None and previous_letter is not None and ord(letter) - ord(previous_letter) == 1
    return None if is_listed else letter


def _read_agreeing_letter(statement: Statement, choices: Choices) -> str | None:
    """Return the letter of a statement such as `the answer is C`.

    None: it names a second choice or is withdrawn, or another choice's text follows (`C, red`, where red is B).
    """
    own_text = choices.text_of(statement.letter)
    if statement.has_second_choice(own_text) or choices.is_withdrawn(statement.letter, statement.following):
        return None
    letter_of_text = choices.by_text(statement.following_in_line)
    return statement.letter if letter_of_text in (None, statement.letter) else None
