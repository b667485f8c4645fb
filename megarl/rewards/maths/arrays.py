"""Rows in a LaTeX environment: functions by cases, and systems of equations."""

from __future__ import annotations

import re

from megarl.rewards.maths.notation import TEXT

_BRACED_ARRAY = re.compile(
    r"\\left\s*(?:\\\{|\\lbrace)\s*\\begin\{(?P<name>array|matrix|aligned|split)\}(?:\{[^{}]*\})?(?P<rows>.*?)"
    r"\\end\{(?P=name)\}\s*\\right\s*\.",
    re.DOTALL,
)
"""Matches an array behind a single brace: cases in older LaTeX."""
_CASES = re.compile(r"\\begin\{[dr]?cases\}(?P<rows>.*?)\\end\{[dr]?cases\}", re.DOTALL)
_ALIGNED = re.compile(r"\\begin\{(aligned|align\*?|gathered|split)\}(?P<rows>.*?)\\end\{\1\}", re.DOTALL)
_ROW_SPACE = re.compile(r"\\\\\s*\[\s*-?[0-9.]+\s*(?:pt|em|ex|mm|cm)\s*\]")


def _match_any_word(words: str) -> str:
    """Return a pattern for one of the words, plain or in a \\text{}, and the separators before it."""
    return rf"[\s,&]*(?:{TEXT}\s*,?\s*(?:{words})\s*\}}|\b(?:{words})\b)"


_CONDITION_WORD = re.compile(rf"{_match_any_word('if|for|when|where')}\s*")
_OTHERWISE = re.compile(rf"{_match_any_word('otherwise|else')}[\s.,;]*$")
_COMMA_OF_VALUE = re.compile(r"\s*,\s*&")
_RELATION_SIGN = re.compile(r"[<>=≤≥≠∈]|\\(?:le|leq|leqslant|ge|geq|geqslant|ne|neq|lt|gt|in)(?![A-Za-z])")


def rewrite_arrays(text: str) -> str:
    r"""Return a text with cases in one notation, and without the alignment of equations.

    Cases have one `&` before each condition, no `if`, and `otherwise` in a \text{}.
    """
    text = _BRACED_ARRAY.sub(_write_cases, _ROW_SPACE.sub(r"\\\\", text))
    return _ALIGNED.sub(_write_statements, _CASES.sub(_separate_conditions, text))


def _write_cases(array: re.Match[str]) -> str:
    rows = array["rows"] if array["name"] in ("array", "matrix") else array["rows"].replace("&", "")
    return rf"\begin{{cases}}{rows}\end{{cases}}"


def _write_statements(lines: re.Match[str]) -> str:
    return lines["rows"].replace("&", "").strip().removesuffix(r"\\")


def _separate_conditions(cases: re.Match[str]) -> str:
    rows = [_separate_condition(row) for row in cases["rows"].split(r"\\") if row.strip()]
    return r"\begin{cases}" + r" \\ ".join(rows) + r"\end{cases}"


def _separate_condition(row: str) -> str:
    """Return a row of cases with `&` between value and condition: `x, x > 0` gives `x & x > 0`."""
    row = _OTHERWISE.sub(r" & \\text{otherwise}", row)
    row = _CONDITION_WORD.sub(" & ", row, count=1).strip().rstrip(",;. ")
    row = _COMMA_OF_VALUE.sub(" &", row)
    value, comma, condition = row.rpartition(",")
    # In `x^2, x > 0` the comma separates the value from its condition. In `x = 1, y = 2` it does not.
    has_condition = comma and "&" not in row and _RELATION_SIGN.search(condition) and not _RELATION_SIGN.search(value)
    if has_condition and value.count("(") == value.count(")"):
        return f"{value} & {condition}"
    return row
