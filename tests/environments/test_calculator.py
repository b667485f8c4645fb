"""The calculator's values, and what it refuses at once."""

from __future__ import annotations

import math
import time

import pytest

from megarl.environments.calculator import as_text, evaluate
from megarl.environments.tools import ToolError


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("-(2 + 3) ** 2", "-25"),
        ("123456789 * 987654321", "121932631112635269"),
        ("6 / 3", "2"),
        ("7 / 2", "3.5"),
        ("1 / 3", "0.333333333333"),
        ("7 // 2 + 7 % 2", "4"),
        ("2 ^ 10", "1024"),
        ("3 \u00d7 4 \u00f7 6", "2"),
        ("2 ** -1", "0.5"),
        ("sqrt(16) + abs(-2) + max(1, 5)", "11"),
        ("round(2.567, 1)", "2.6"),
        ("1 ** 10 ** 9", "1"),
        ("2 ** 2000", str(2**2000)),
        ("pi", f"{math.pi:.12g}"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert as_text(evaluate(expression)) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9", "9**9**9**9", "2**(10**9)", "(2**2000)**2000", "10**9**9 % 7", "2**-(10**9)", "round(5, -10**9)",
        "1/0", "0 ** -1", "5 % 0", "(-8) ** 0.5", "1e308 * 10", "exp(10**6)", "sqrt(-1)",
        "", "x", "1 +", "a.b", "().__class__", "__import__('os')", "[1]", "'a' * 3", "True", "1 if 2 else 3", "f(1)",
        "abs(x=1)", "lambda: 1", "1; 2", "(" * 400, "-" * 450 + "1", "1" * 501, "max()", "1or 2", "1j", "\x00",
    ],
)  # fmt: skip
def test_what_is_no_arithmetic_or_too_large_is_an_error_at_once(expression: str) -> None:
    start = time.process_time()
    with pytest.raises(ToolError):
        evaluate(expression)
    assert time.process_time() - start < 1.0
