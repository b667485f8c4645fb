"""Countdown, the number and Mastermind: what is drawn, how guesses are judged, when a game ends."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from fractions import Fraction

import pytest

from megarl.environments import Environment, Step, Turn
from megarl.environments.countdown import Countdown, draw_problem, explain_wrong_guess, find_guess
from megarl.environments.guess_number import GuessNumber
from megarl.environments.mastermind import Mastermind, count_marks
from megarl.types import Problem


def problem(index: int, **record: object) -> Problem:
    messages = ({"role": "system", "content": "Play."}, {"role": "user", "content": "Start."})
    return Problem(index, messages, (1,), "", record)


async def play(game: Environment, at: Problem, texts: Sequence[str]) -> tuple[str, list[Step]]:
    """The question, and the steps of the turns."""
    start = await game.reset(at, 5)
    assert start.messages[0] == at.messages[0]
    steps = [await game.step(Turn(number, text, "stop")) for number, text in enumerate(texts)]
    await game.close()
    return start.messages[-1]["content"], steps


def hints(steps: Sequence[Step]) -> list[str]:
    return [step.messages[0]["content"] for step in steps if step.messages]


def test_countdown_is_drawn_from_the_problem_and_has_a_solution() -> None:
    assert draw_problem(3, 4, 20) == draw_problem(3, 4, 20)
    drawn = [draw_problem(index, 3, 9) for index in range(200)]
    assert len({(*numbers, target) for numbers, target in drawn}) > 150
    for numbers, target in drawn:
        expressions = {
            expression
            for a, b, c in [(*numbers,)]
            for one in "+-*/"
            for expression in (f"{a}{one}{b}", *(f"({a}{one}{b}){two}{c}" for two in "+-*/"))
        }
        assert any(explain_wrong_guess(expression, numbers, target) is None for expression in expressions), (
            numbers,
            target,
        )
        assert target not in numbers


async def test_countdown_judges_guesses() -> None:
    game = Countdown(max_guesses=3)
    at = problem(0, numbers=[3, 4, 5], target=23)
    question, steps = await play(game, at, ["3 * 4 + 5", "I add: 3 + 4 * 5 = 23\n"])
    assert "23" in question and "3, 4, 5" in question
    assert hints(steps) == ["No: that makes 17, not 23. Try again."]
    assert steps[1] == Step(reward=1.0, done=True, answer_correct=True, metrics={"guesses": 1.0})
    _, steps = await play(Countdown(), at, ["4 * 4"])
    assert (steps[0].reward, steps[0].done, steps[0].answer_correct) == (0.0, True, False)
    assert explain_wrong_guess("<answer>3 + 4 * 5</answer>", [3, 4, 5], 23) is None
    assert explain_wrong_guess("\\boxed{(3+4*5)}", [3, 4, 5], 23) is None
    assert explain_wrong_guess("4 * 5 + 3 * 1", [3, 4, 5], 23) == "1 is used too often"
    assert explain_wrong_guess("23", [3, 4, 5], 23) == "23 is used too often"
    assert "allowed" in str(explain_wrong_guess("3**4", [3, 4], 81))
    assert "division" in str(explain_wrong_guess("3/(4-4)", [3, 4, 4], 1))
    assert find_guess("no numbers") is None


def test_countdown_computes_without_rounding() -> None:
    assert explain_wrong_guess("8 / (3 - 8 / 3)", [3, 3, 8, 8], 24) is None
    assert explain_wrong_guess("3 / 7 * 49 / 21", [3, 7, 21, 49], 1) is None
    assert explain_wrong_guess("1 / 3", [1, 3], 1) == "that makes 1/3, not 1"
    assert explain_wrong_guess("3 \u00d7 4 \u00f7 6", [3, 4, 6], 2) is None
    generator = random.Random(0)
    for _ in range(500):
        numbers = [generator.randint(1, 20) for _ in range(4)]
        first, second, third = (generator.choice("+-*/") for _ in range(3))
        a, b, c, d = numbers
        expression = generator.choice(
            [f"(({a}{first}{b}){second}{c}){third}{d}", f"{a}{first}({b}{second}({c}{third}{d}))"]
        )
        try:
            value = eval(re.sub("([0-9]+)", r"Fraction(\1)", expression), {"Fraction": Fraction})
        except ZeroDivisionError:
            continue
        if value.denominator == 1:
            assert explain_wrong_guess(expression, numbers, int(value)) is None, expression
            assert explain_wrong_guess(expression, numbers, int(value) + 1) is not None, expression


async def test_the_number_is_found_by_halving() -> None:
    game = GuessNumber(max_number=100, max_guesses=8)
    for index in range(20):
        low, high, texts = 1, 100, []
        _, steps = await play(game, problem(index), ["50"])
        while not steps[-1].done:
            if texts:
                low, high = (int(texts[-1]) + 1, high) if hints(steps)[-1] == "Higher." else (low, int(texts[-1]) - 1)
            texts.append(str((low + high) // 2))
            _, steps = await play(game, problem(index), [f"Not 7 but {text}" for text in texts])
        assert steps[-1].reward == 1.0 and len(steps) <= 7
    _, steps = await play(GuessNumber(max_guesses=2), problem(0), ["none", "0"])
    assert hints(steps) == ["Give a number."]
    assert (steps[-1].done, steps[-1].reward) == (True, 0.0)


async def test_a_state_of_the_number_game_is_what_the_hints_leave() -> None:
    game = GuessNumber(max_number=100, max_guesses=8)
    start = await game.reset(problem(0), 5)
    secret = game.secret
    guesses = [str(secret - 1), "none", str(secret + 1), "0", str(secret)]
    steps = [await game.step(Turn(number, text, "stop")) for number, text in enumerate(guesses)]
    assert start.state == "1 to 100, 0 guesses"
    assert [step.state for step in steps] == [
        f"{secret} to 100, 1 guesses", f"{secret} to 100, 2 guesses", f"{secret} to {secret}, 3 guesses",
        f"{secret} to {secret}, 4 guesses", None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("guess", "secret", "found"),
    [
        ("ABCD", "ABCD", (4, 0)),
        ("ABCD", "DCBA", (0, 4)),
        ("AABB", "ABAC", (1, 2)),
        ("EEEE", "ABCD", (0, 0)),
        ("", "A", (0, 0)),
    ],
)
def test_marks(guess: str, secret: str, found: tuple[int, int]) -> None:
    assert count_marks(guess, secret) == found


async def test_mastermind_ends_with_the_word_or_the_last_guess() -> None:
    game = Mastermind(max_guesses=2, partial_reward=0.5)
    await game.reset(problem(4), 0)
    secret = game.secret
    assert set(secret) <= set("ABCDEF") and len(secret) == 4
    _, steps = await play(game, problem(4), ["Perhaps", f"{secret[::-1]} or {secret}."])
    assert hints(steps) == ["Give a word of 4 letters."]
    assert (steps[-1].done, steps[-1].reward, steps[-1].answer_correct) == (True, 1.0, True)
    wrong = secret[:3] + ("A" if secret[3] != "A" else "B")
    _, steps = await play(game, problem(4), [wrong, wrong])
    assert hints(steps)[0].startswith("3 in place")
    assert (steps[-1].reward, steps[-1].answer_correct) == (pytest.approx(0.375), False)


@pytest.mark.parametrize(
    "make", [lambda: Countdown(num_numbers=1), lambda: GuessNumber(max_number=1), lambda: Mastermind(length=0)]
)
def test_settings_are_checked(make: object) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match="must be"):
        make()
