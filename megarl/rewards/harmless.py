"""Texts that are harmless to evaluate as Python: literals and formulas, in which nothing can be called or looked up.

Some scorers of reasoning-gym evaluate what an answer says. Needs the standard library alone: the process of the
environment `reasoning_gym` loads this file too.
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
"""Tasks whose scorers evaluate an answer that is not the gold one as a Python literal."""
FORMULAS = frozenset(
    ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")
)
"""Tasks whose scorers evaluate the answer as a formula."""


def harmless_answer(task: str, said: str, entry: Mapping[str, Any]) -> str:
    """An answer to an entry of a task; none where its scorer would evaluate it and it might do more than be a value."""
    if task in FORMULAS:
        return said if is_formula(said) else ""
    if task in LITERALS:
        # Only what is none of these texts is evaluated.
        known = (entry["answer"].strip(), *entry["metadata"].get("valid_answers", ()))
        return said if said in known or is_literal(said) else ""
    return said


def is_literal(text: str) -> bool:
    """Whether a text is a number, a string, or lists and the like of these."""
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return True


def is_formula(text: str) -> bool:
    """Whether a text is of numbers, variables of one letter, arithmetic, powers and usual functions.

    It has no attribute, no quotes, no brackets but round ones and no other name, so that a parser that evaluates it
    finds nothing but mathematics. Powers of powers may still take any time and memory.
    """
    if _TOKEN.sub("", text) or _depth(text) > _MAX_NESTING:
        return False
    return all(len(name) == 1 or name in _FUNCTIONS for name in _NAME.findall(text))


def is_integer_arithmetic(text: str) -> bool:
    """Whether a text is of numbers and operators alone, those of bits among them."""
    try:
        tree = ast.parse(text, mode="eval")
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return all(isinstance(node, _ARITHMETIC) for node in ast.walk(tree)) and all(type(one) is int for one in constants)


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    return deepest
