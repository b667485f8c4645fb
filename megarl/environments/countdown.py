"""Countdown, a game of numbers."""

from __future__ import annotations

import ast
import operator
import random
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

from megarl.environments import Start, Step, Turn
from megarl.environments.calculator import MAX_DEPTH, arithmetic_tree
from megarl.environments.tools import ToolError
from megarl.tracking.metric_rows import PER_ATTEMPT, MetricRow
from megarl.types import Problem

METRICS = (MetricRow("environment/guesses", "count", "guesses in a game", PER_ATTEMPT),)
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SIGNS: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
# Unicode signs that models write for multiplication, division and minus.
_ASCII_SIGNS = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-", "\u00b7": "*"})


class Countdown:
    """Game of reaching a target with given numbers, each used at most once.

    A record may give `numbers` and `target`. Otherwise the problem's index determines them. The guess is the last line
    of a turn with an expression; `= TARGET` may follow. The reply to a wrong guess says what is wrong, for up to
    `max_guesses` guesses. The reward is 1 if the target is reached, else 0.
    """

    makes_problems = True

    def __init__(self, *, num_numbers: int = 4, max_number: int = 20, max_guesses: int = 1) -> None:
        if not 2 <= num_numbers <= 8 or max_number < 2 or max_guesses < 1:
            raise ValueError("num_numbers must be from 2 to 8, max_number at least 2, max_guesses at least 1")
        self.num_numbers = num_numbers
        self.max_number = max_number
        self.max_guesses = max_guesses

    async def reset(self, problem: Problem, seed: int) -> Start:
        """Take numbers and target from the record, or draw them, and pose the question."""
        record = problem.record
        if "numbers" in record and "target" in record:
            self.numbers, self.target = [int(number) for number in record["numbers"]], int(record["target"])
        else:
            self.numbers, self.target = draw_problem(problem.index, self.num_numbers, self.max_number)
        numbers = ", ".join(map(str, self.numbers))
        question = f"Reach {self.target} with the numbers {numbers} by + - * / and brackets. Use each at most once."
        return Start((*problem.messages[:-1], {"role": "user", "content": question}))

    async def step(self, turn: Turn) -> Step:
        """Judge the guess in a turn. A wrong guess gets the reason, until no guess is left."""
        fault = explain_wrong_guess(turn.text, self.numbers, self.target)
        if fault is None:
            return Step(reward=1.0, done=True, answer_correct=True, metrics={"guesses": 1.0})
        if turn.number + 1 >= self.max_guesses:
            return Step(reward=0.0, done=True, answer_correct=False, metrics={"guesses": 1.0})
        return Step(({"role": "user", "content": f"No: {fault}. Try again."},), metrics={"guesses": 1.0})

    async def close(self) -> None:
        pass


def draw_problem(index: int, num_numbers: int, max_number: int) -> tuple[list[int], int]:
    """Draw numbers and a target. Some numbers together reach the target, but none equals it.

    Equal arguments give equal results.
    """
    # A text as seed gives the same problem in every process.
    generator = random.Random(f"countdown {index} {num_numbers} {max_number}")
    while True:
        numbers = [generator.randint(1, max_number) for _ in range(num_numbers)]
        value = Fraction(numbers[0])
        for number in numbers[1 : generator.randint(2, num_numbers)]:
            choices = [value + number, value - number, value * number, value / number]
            # Positive whole numbers below 1000 only, so that intermediate values are easy to compute by hand.
            value = generator.choice([choice for choice in choices if choice.denominator == 1 and 0 < choice < 1000])
        if value not in numbers:
            return numbers, int(value)


def explain_wrong_guess(text: str, numbers: list[int], target: int) -> str | None:
    """Return why the guess in a text misses the target; None: the guess is right."""
    expression = find_guess(text)
    if expression is None:
        return "there is no expression"
    try:
        value = exact_value(expression)
    except ToolError as error:
        return str(error)
    # The expression may use each given number only as often as it is given.
    used_numbers = Counter(int(number) for number in re.findall(r"[0-9]+", expression))
    if overused_numbers := used_numbers - Counter(numbers):
        return f"{next(iter(overused_numbers))} is used too often"
    if value != target:
        return f"that makes {value}, not {target}"
    return None


def exact_value(expression: str) -> Fraction:
    """Return the exact value of an expression of whole numbers, + - * / and brackets. Raises ToolError for other
    text.
    """
    try:
        return _evaluate_node(arithmetic_tree(expression), 0)
    except ZeroDivisionError:
        raise ToolError("division by zero") from None


def _evaluate_node(node: ast.expr, depth: int) -> Fraction:
    """Return the exact value of a syntax tree's node. Raises ToolError for anything but + - * / of whole numbers."""
    if depth > MAX_DEPTH:
        raise ToolError("the expression is nested too deeply")
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
        return _SIGNS[type(node.op)](_evaluate_node(node.operand, depth + 1))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_evaluate_node(node.left, depth + 1), _evaluate_node(node.right, depth + 1))
    raise ToolError("only whole numbers and + - * / are allowed")


def find_guess(text: str) -> str | None:
    """Return a text's last expression, without tags, \boxed{} and any text after `=`; None: there is none."""
    for line in reversed(re.sub(r"</?\w+>", "\n", text).splitlines()):
        box_match = re.search(r"\\boxed\{(.*)\}", line)
        text_before_equals = (box_match.group(1) if box_match else line).partition("=")[0].translate(_ASCII_SIGNS)
        candidates = re.findall(r"[0-9(-][0-9\s+\-*/%().]*", text_before_equals)
        expressions = [candidate.strip(" .") for candidate in candidates if re.search("[0-9]", candidate)]
        if expressions:
            return expressions[-1]
    return None
