"""Stated choices: everyday ways to name one choice, and texts that name another, none or several."""

from __future__ import annotations

import time

import pytest

from megarl.rewards.functions.multiple_choice import multiple_choice
from tests.rewards.functions.choice_pairs import CHOICES, RIGHT, WRONG


@pytest.mark.parametrize("text", RIGHT)
def test_everyday_statements_name_the_choice(text: str) -> None:
    assert multiple_choice(text, "C", CHOICES).answer_correct


@pytest.mark.parametrize("text", WRONG)
def test_other_statements_are_not_paid(text: str) -> None:
    reward = multiple_choice(text, "C", CHOICES)
    assert not reward.answer_correct and reward.score == 0.0


@pytest.mark.parametrize(
    ("text", "choices", "letter"),
    [
        ("The answer is A because it fits.", ["5", "5!"], "A"),
        ("\\boxed{5!}", ["5", "5!"], "B"),
        ("The answer is I because it fits.", list("123456789"), "I"),
        ("The answer is I think 2.", list("123456789"), None),
        ("The answer is A number.", ["1", "2"], None),
        ("The answer is B: -5", ["5", "-5"], "B"),
        ("The answer is B - 5", ["5", "-5"], None),
        ("The answer is A - 5", ["5", "-5"], "A"),
        ("Answer: -5", ["5", "-5"], "B"),
        ("\\boxed{(B)green}", ["red", "green"], "B"),
        ("\\boxed{(B!}", ["red", "green"], None),
        ("The answer is (A) A and B.", ["A and B", "B and C"], "A"),
        ("\\boxed{A. A and B}", ["A and B", "B and C"], "A"),
        ("A. B and C", ["A and B", "B and C"], None),
        ("The answer is 3.", ["1", "3"], "B"),
        ("The answer is not 3.", ["1", "3"], None),
        ("The answer is 3 or 1.", ["1", "3"], None),
    ],
)
def test_letters_and_texts_that_are_words_or_numbers(text: str, choices: list[str], letter: str | None) -> None:
    record = {"choices": [*choices, *"xyz"]}
    letters = "ABCDEFGHIJKL"[: len(record["choices"])]
    right = [gold for gold in letters if multiple_choice(text, gold, record, gold="letter").answer_correct]
    assert right == ([letter] if letter else [])


@pytest.mark.parametrize(
    "part",
    [
        ")",
        " ",
        "(",
        "*",
        "answer ",
        "answer is (",
        "The answer is C ",
        "[{(",
        "\\text{",
        "- ",
        "if not answer is C ",
        "no, ",
        "wait A is ",
        "answer: C not A if ",
        "actually A and B and ",
        "answer is C not sure that the ",
        "answer is C, while A x ",
    ],
)
def test_long_texts_take_no_long_time(part: str) -> None:
    started = time.process_time()
    multiple_choice(f"The answer is C {part * (20_000 // len(part))}", "C", CHOICES)
    assert time.process_time() - started < 1.0
