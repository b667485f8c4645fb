"""Texts that are harmless to evaluate as Python: literals and formulas, in which nothing can be called or looked up."""

from __future__ import annotations

import ast
import re

_FORMULA = re.compile(r"(?:\d++(?:\.\d*+)?|\.\d++|[A-Za-z]\w*+|[-+*/^(),\s])*+", re.ASCII)
_NAME = re.compile(r"[A-Za-z]\w*", re.ASCII)
_FUNCTIONS = """
Abs abs acos acosh acot asec acsc asin asinh atan atanh cos cosh cot csc exp ln log pi sec sin sinh sqrt tan tanh
""".split()  # noqa: SIM905
_MAX_NESTING = 50
_ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant)


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
    if not _FORMULA.fullmatch(text) or _depth(text) > _MAX_NESTING:
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
