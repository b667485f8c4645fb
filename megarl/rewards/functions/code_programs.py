"""Runs of a sampled program on its tests, and comparison of its results with the expected ones."""

from __future__ import annotations

import json
import math
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

from megarl.rewards.functions.code_cases import Case

_RELATIVE, _ABSOLUTE = 1e-5, 1e-8
"""Relative and absolute tolerance of printed decimal fractions, as in ColossalRL (numpy.allclose)."""
_MAX_DIGITS = 200_000
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
"""Matches a printed decimal number. Python's float() would also accept 1_0, nan and inf."""
_FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})([^\n`]*)$", re.MULTILINE)
_PYTHON = re.compile(r"\s*\{?\.?(?:py|python)[\d.]*\b", re.IGNORECASE)
_PRELUDE = """
import bisect, cmath, collections, copy, datetime, fractions, functools, heapq, io, itertools, math, operator
import random, re, statistics, string, sys, time
from bisect import *
from collections import *
from copy import *
from fractions import *
from functools import *
from heapq import *
from itertools import *
from math import *
from operator import *
from typing import *
from random import *
from builtins import *
"""
"""Imports before a sampled program. `builtins` come last, because math.pow differs from Python's own pow."""
_LONG_INTEGERS = "import sys\nif hasattr(sys, 'set_int_max_str_digits'):\n    sys.set_int_max_str_digits(0)\n"
"""Start of every program: permits long integers. By default Python 3.11 and later refuse more than 4,300 digits."""
_NUMPY = "import numpy\nimport numpy as np\n"
_CALL = """
import io, json, sys
def _as_json(value):
    return value.tolist() if hasattr(value, "tolist") else list(value)
_call = json.loads(sys.stdin.read())
_printed, sys.stdout, sys.stdin = sys.stdout, io.StringIO(), io.StringIO()
_space = {"__name__": "solution", "__builtins__": __builtins__}
exec(_call["prelude"], _space)
exec(compile(_call["source"], "solution.py", "exec", dont_inherit=True), _space)
_owner = _space.get("Solution")
_function = getattr(_owner(), _call["function"], None) if isinstance(_owner, type) else None
if _function is None:
    _function = _space[_call["function"]]
_result = _function(*_call["arguments"])
_printed.write("\\n" + _call["mark"] + json.dumps(_result, default=_as_json) + "\\n")
_printed.flush()
"""


@contextmanager
def long_integers() -> Iterator[None]:
    """Permit integers of up to 200,000 digits inside this context, for the comparison of results.

    Python's own limit is 4,300 digits. Without any limit, reading a million digits would take ten seconds.
    """
    limit_before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(_MAX_DIGITS)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(limit_before)


def last_block(text: str) -> str | None:
    """Return the source code in the last fenced block of Python, or without one in the last fenced block.

    A block after the program often shows its output. An indented block loses the indentation of its fence. None: no
    block exists, or the last one is not closed.
    """
    opening: re.Match[str] | None = None
    block = python_block = None
    for fence in _FENCE.finditer(text):
        if opening is None:
            opening = fence
        # A fence closes only with the same character, at least the same length, and no language name (CommonMark).
        elif fence[2][0] == opening[2][0] and len(fence[2]) >= len(opening[2]) and not fence[3].strip():
            block = _without_indentation(text[opening.end() + 1 : fence.start()], len(opening[1]))
            python_block = block if _PYTHON.match(opening[3]) else python_block
            opening = None
    if opening is not None:
        return None
    return block if python_block is None else python_block


def _without_indentation(block: str, width: int) -> str:
    return re.sub(rf"^[ \t]{{1,{width}}}", "", block, flags=re.MULTILINE) if width else block


class Trial:
    """One run of a sampled program on a test: the complete program, its standard input, and the check of its output."""

    def __init__(self, source: str, case: Case, *, has_numpy: bool) -> None:
        self._case = case
        # Importing numpy takes longer than most tests run.
        needs_numpy = has_numpy and re.search(r"\b(np|numpy)\.", source) is not None
        prelude = _PRELUDE + (_NUMPY if needs_numpy else "")
        if case.function is None:
            # The source is compiled separately, so that its own `from __future__` and line numbers work.
            run_source = f"exec(compile({source!a}, 'solution.py', 'exec', dont_inherit=True))"
            self.program = f"{_LONG_INTEGERS}{prelude}\n{run_source}"
            self.stdin = case.stdin
            return
        # A secret marks the result's line, so that printed text is not taken for it. A solution that finds the secret
        # gains nothing: it can only mark its own result.
        self._mark = secrets.token_hex(16)
        call = {
            "prelude": prelude,
            "source": source,
            "function": case.function,
            "arguments": case.arguments,
            "mark": self._mark,
        }
        self.program, self.stdin = _LONG_INTEGERS + _CALL, json.dumps(call)

    @property
    def output_bytes(self) -> int:
        """Return the limit of the program's output in bytes: twice the expected length plus a margin."""
        expected = self._case.expected
        return 4096 + 2 * len(expected if isinstance(expected, str) else json.dumps(expected))

    def passes(self, stdout: str) -> bool:
        """Return whether the program's output is right: its text, or the result of the called function.

        The result is JSON on the last line that begins with the mark. It is right if it equals the expected value, or
        the value's text in the data (`Case.text`).
        """
        if self._case.function is None:
            return same_output(stdout, self._case.expected)
        result_line = next((line for line in reversed(stdout.splitlines()) if line.startswith(self._mark)), None)
        if result_line is None:
            return False
        try:
            result = json.loads(result_line.removeprefix(self._mark))
        except (ValueError, RecursionError):
            return False
        is_expected_text = self._case.text is not None and result == self._case.text
        # Pass the expected value through JSON too: the result came as JSON.
        return is_expected_text or same_value(result, json.loads(json.dumps(self._case.expected)))


def same_output(printed: str, expected: str) -> bool:
    r"""Return whether a program printed the expected text, compared line by line and word by word.

    Blanks around words, and empty lines at the beginning and end, are ignored. Words must be equal as texts, or as
    finite decimals in ASCII digits. An expected number with a fraction permits a relative difference of 1e-5. Only \n
    ends a line.
    """
    lines, expected_lines = _list_stripped_lines(printed), _list_stripped_lines(expected)
    return len(lines) == len(expected_lines) and all(map(_is_same_line, lines, expected_lines))


def _list_stripped_lines(text: str) -> list[str]:
    text = text.strip()
    return [line.strip() for line in text.split("\n")] if text else []


def _is_same_line(line: str, expected_line: str) -> bool:
    if line == expected_line:
        return True
    words, expected_words = line.split(), expected_line.split()
    return len(words) == len(expected_words) and all(map(_is_same_word, words, expected_words))


def _is_same_word(word: str, expected_word: str) -> bool:
    if word == expected_word:
        return True
    # An expected integer must match exactly. Very long words are not parsed, to keep the comparison fast.
    if not re.search(r"[0-9][.eE]|\.[0-9]", expected_word) or len(word) > 100:
        return False
    is_decimal = _DECIMAL.fullmatch(word) is not None and _DECIMAL.fullmatch(expected_word) is not None
    return is_decimal and _is_close(word, expected_word)


def _is_close(result: float | str, expected: float | str) -> bool:
    """Return whether two numbers are equal within the tolerance. Infinite ones must be equal."""
    try:
        expected_number = float(expected)
        tolerance = _ABSOLUTE + _RELATIVE * abs(expected_number)
        number = float(result)
    except OverflowError:  # An integer exceeds all floats.
        return result == expected
    if not math.isfinite(number) or not math.isfinite(expected_number):
        return result == expected
    return math.isclose(number, expected_number, rel_tol=0.0, abs_tol=tolerance)


def same_value(result: Any, expected: Any) -> bool:
    """Return whether a function returned the expected JSON value.

    Floats may differ by the tolerance of `same_output`. The data sets APPS and TACO wrap the expected value into a list
    of one; the bare value is accepted too.
    """
    return _is_same_value(result, expected) or (
        isinstance(expected, list) and len(expected) == 1 and _is_same_value(result, expected[0])
    )


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_same_value(result: Any, expected: Any) -> bool:
    if isinstance(result, list) and isinstance(expected, list):
        return len(result) == len(expected) and all(map(_is_same_value, result, expected))
    if isinstance(result, dict) and isinstance(expected, dict):
        return result.keys() == expected.keys() and all(_is_same_value(result[key], expected[key]) for key in result)
    if isinstance(result, float) or isinstance(expected, float):
        return _is_number(result) and _is_number(expected) and _is_close(result, expected)
    # Compare types too: True == 1 in Python, but not here.
    return type(result) is type(expected) and result == expected
