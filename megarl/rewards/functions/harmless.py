"""Safe use of reasoning-gym's scorers, some of which evaluate an answer as Python code.

Only literals and formulas, without calls and attribute look-ups, are evaluated. This file uses only the standard
library: the process of environment `reasoning_gym` loads it too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

_TOKEN = re.compile(r"\d+(?:\.\d*)?|\.\d+|[A-Za-z]\w*|[-+*/^(),\s]", re.ASCII)
_NAME = re.compile(r"[A-Za-z]\w*", re.ASCII)
_FUNCTIONS = """
Abs abs acos acosh acot asec acsc asin asinh atan atanh cos cosh cot csc exp ln log pi sec sin sinh sqrt tan tanh
""".split()  # noqa: SIM905
_MAX_NESTING = 50
_ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant)

LITERALS = frozenset(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"))
"""Tasks of reasoning-gym whose scorer evaluates an answer other than the gold answer as a Python literal."""
FORMULAS = frozenset(
    ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")
)
"""Tasks of reasoning-gym whose scorer evaluates an answer as a formula."""


CORRECT_FROM = 0.99
"""Lowest score of a right answer. Scores are sums of floats, so a perfect score may be slightly below 1."""
_NO_GOLD = ("null", "", "None")


def score_safely(task: str, dataset: Any, answer: str | None, entry: Mapping[str, Any]) -> float:
    """Return the score of an answer by reasoning-gym's scorer of `task`.

    `dataset` has the scorer; `entry` is the problem. `answer` None: the completion has no answer. The score is 0 if the
    scorer raises an error on the answer. If the scorer also fails on the gold answer, its error is raised.
    """
    if task == "game_of_life_halting":
        # reasoning-gym's scorer takes any text for True.
        return float(answer is not None and answer.casefold() == entry["answer"].casefold())
    try:
        return float(dataset.score_answer(answer and harmless_answer(task, answer, entry), entry))
    except Exception:
        if entry["answer"] not in _NO_GOLD:
            dataset.score_answer(entry["answer"], entry)  # Raises if the problem is faulty.
        return 0.0


def harmless_answer(task: str, answer: str, entry: Mapping[str, Any]) -> str:
    """Return an answer if the scorer of `task` evaluates it safely, else an empty text."""
    if task in FORMULAS:
        return answer if is_formula(answer) else ""
    if task in LITERALS:
        # The scorer evaluates only texts other than these.
        texts_not_evaluated = (entry["answer"].strip(), *entry["metadata"].get("valid_answers", ()))
        return answer if answer in texts_not_evaluated or is_literal(answer) else ""
    return answer


def is_literal(text: str) -> bool:
    """Return whether a text is a Python literal: a number, a string, or a list, tuple, dict or set of literals."""
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return True


def is_formula(text: str) -> bool:
    """Return whether a text consists of numbers, one-letter variables, arithmetic, powers and usual functions.

    Its evaluation is safe: it has no attributes, quotes, square brackets or other names. Powers of powers may still
    take unlimited time and memory.
    """
    if _TOKEN.sub("", text) or _count_nesting(text) > _MAX_NESTING:
        return False
    return all(len(name) == 1 or name in _FUNCTIONS for name in _NAME.findall(text))


def is_integer_arithmetic(text: str) -> bool:
    """Return whether a text consists of whole numbers and operators, including bit operators."""
    try:
        tree = ast.parse(text, mode="eval")
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    nodes = list(ast.walk(tree))
    has_only_integers = all(type(node.value) is int for node in nodes if isinstance(node, ast.Constant))
    return has_only_integers and all(isinstance(node, _ARITHMETIC) for node in nodes)


def _count_nesting(text: str) -> int:
    depth = max_depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        max_depth = max(max_depth, depth)
    return max_depth
