"""Environment with a calculator as a tool."""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable
from typing import Any

from megarl.environments.tools import ToolEnvironment, ToolError, tool

Number = int | float

MAX_CHARACTERS = 500
MAX_BITS = 2048
"""Maximum bits of an integer. Operations on smaller integers take microseconds."""
MAX_DEPTH = 50

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def _round(value: Number, digits: int = 0) -> Number:
    # More digits than a float has are useless, and a huge number of digits makes `round` slow.
    if not isinstance(digits, int) or abs(digits) > 100:
        raise ToolError("the second argument of round (digits) must be an integer from -100 to 100")
    return round(value, digits) if digits else round(value)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "min": min, "max": max, "round": _round, "sqrt": math.sqrt, "floor": math.floor, "ceil": math.ceil,
    "exp": math.exp, "log": math.log, "sin": math.sin, "cos": math.cos, "tan": math.tan, "gcd": math.gcd,
}  # fmt: skip
_CONSTANTS = {"pi": math.pi, "e": math.e}


class Calculator(ToolEnvironment):
    """Environment with the problem's messages and the tool `calculator`."""

    @tool
    async def calculator(self, expression: str) -> str:
        """The value of an arithmetic expression.

        expression: numbers with + - * / // % ** and brackets, like (3 + 4) * 5
        """
        return as_text(evaluate(expression))


def evaluate(expression: str) -> Number:
    """Return the value of an arithmetic expression, in milliseconds at most. Integers are exact.

    Raises ToolError for other text, and for too large numbers.
    """
    tree = arithmetic_tree(expression)
    try:
        return _evaluate_node(tree, 0)
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except (ValueError, TypeError, OverflowError) as error:
        raise ToolError(str(error)) from None


def arithmetic_tree(expression: str) -> ast.expr:
    """Return Python's syntax tree of an expression. Raises ToolError if the text is too long or not an expression."""
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"the expression has {len(expression)} characters; at most {MAX_CHARACTERS} are allowed")
    # Models also write the Unicode signs of multiplication and division, and ^ for powers.
    normalised_text = expression.replace("\u00d7", "*").replace("\u00f7", "/").replace("^", "**").strip()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns about text like `1or 2`.
            return ast.parse(normalised_text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError("this is not a valid arithmetic expression") from None


def as_text(value: Number) -> str:
    """Return a number as text: an integer with all digits, a fraction with at most twelve."""
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _evaluate_node(node: ast.expr, depth: int) -> Number:
    """Return the value of a syntax tree's node at this depth. Raises ToolError for anything but arithmetic."""
    if depth > MAX_DEPTH:
        raise ToolError("the expression is nested too deeply")
    # `type`, not `isinstance`: True and False are instances of int.
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value: Any = node.value
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        value = _UNARY[type(node.op)](_evaluate_node(node.operand, depth + 1))
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        value = _apply_operator(node, _evaluate_node(node.left, depth + 1), _evaluate_node(node.right, depth + 1))
    elif isinstance(node, ast.Name) and node.id in _CONSTANTS:
        value = _CONSTANTS[node.id]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = _FUNCTIONS.get(node.func.id)
        if function is None:
            raise ToolError(f"there is no function {node.func.id}; functions: {', '.join(_FUNCTIONS)}")
        value = function(*(_evaluate_node(argument, depth + 1) for argument in node.args))
    else:
        raise ToolError("only numbers, + - * / // % **, brackets and functions are allowed")
    # Check every intermediate value: with a huge one the next operation could be slow.
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ToolError("the number is too large")
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise ToolError("the result is a complex number, infinite or undefined; only finite real numbers are supported")
    return value


def _apply_operator(node: ast.BinOp, left: Number, right: Number) -> Any:
    """Apply a binary operator. Raises ToolError, before computing, for a power that would be too large."""
    if isinstance(node.op, ast.Pow) and isinstance(left, int) and isinstance(right, int):
        # Check before computing: 9**9**9 has hundreds of millions of digits. A power has at least this number of bits.
        if right > 0 and (left.bit_length() - 1) * right > MAX_BITS:
            raise ToolError("the number is too large")
        if right < 0 and abs(right) > MAX_BITS:
            raise ToolError("the exponent is too large")
    if isinstance(node.op, ast.Div) and isinstance(left, int) and isinstance(right, int) and right:
        # A whole quotient stays an integer: a float would lose digits of large numbers.
        quotient, remainder = divmod(left, right)
        return quotient if remainder == 0 else left / right
    return _BINARY[type(node.op)](left, right)
