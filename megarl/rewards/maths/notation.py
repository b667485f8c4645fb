r"""Rewriting of rarer notations into those of the parser: `]0,1[`, `{\rm cm}`, `\text{(mod 7)}`, `1011 base 2`."""

from __future__ import annotations

import re

_TEXT = r"\\(?:text|textrm|mbox|mathrm|operatorname)\s*\{"
# Both are possessive: with backtracking, a long row of spaces would take cubic time.
_GAP = r"(?:\s|\\[,; ]|\\q?quad)*+"
_BETWEEN_WORDS = rf"(?:[\s{{}}$]|{_TEXT})*+"
_ROOT = re.compile(r"([√∛∜])\s*([0-9]+(?:\.[0-9]+)?|(?=\())")
_ROOT_COMMANDS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_OLD_FONT = re.compile(r"\{\s*\\rm\s+([^{}\\]*)\}|\\rm\s*\{([^{}\\]*)\}|\\rm(?![A-Za-z])")
_NESTED_UNIT = re.compile(r"\\(?:text|mathrm|textrm|mbox)\s*\{(?:[^{}]|\^\s*\{[^{}]*\})*\}")
_BRACED_EXPONENT = re.compile(r"\^\s*\{\s*(-?[0-9])\s*\}")
_END = (
    r"\s*(?:[-+]?\s*(?:[0-9][0-9./]*|\\infty)|[-+]?[a-z]|[-+]?\s*\\frac\s*\{[0-9]+\}\s*\{[0-9]+\}"
    r"|[-+]?[0-9]*\\sqrt\s*\{?[0-9]+\}?|[-+]?[0-9]*\\pi|[-+]?\\frac\s*\{[0-9]*\\pi\s*\}\s*\{[0-9]+\})\s*"
)
_REVERSED_INTERVAL = re.compile(
    rf"(?:(?<![\w}})\]])|(?<=\\in)|(?<=\\cup)|(?<=\\cap))\](?P<low>{_END})[,;](?P<high>{_END})(?P<close>[\[\]])(?![\w{{(])"
    rf"|\[(?P<from>{_END})[,;](?P<to>{_END})\[(?![\w{{(])"
)
"""Matches an interval with a bracket turned outwards, so that this end is open: `]0,1[`, `[0,1[`."""
_INTERVAL = r"[(\[][^()\[\],]*,[^()\[\],]*[)\]]"
_LETTER_OF_UNION = re.compile(
    rf"((?:(?<![A-TV-Za-z0-9_'}}])|(?<=\\in)){_INTERVAL})\s*(?:\\text\s*\{{\s*U\s*\}}|U)\s*(?={_INTERVAL})"
)
_C = r"(?:\\mathrm\s*\{\s*C\s*\}|C)"
_COMBINATIONS = re.compile(
    rf"(?:\{{\}}|(?<![\w}})\]'!|\s]))\s*[_^]\s*\{{?\s*([0-9]+)\s*\}}?\s*{_C}\s*_\s*\{{?\s*([0-9]+)\s*\}}?"
    rf"|(?<![\w}}]){_C}\s*_\s*(?:\{{\s*([0-9]+)\s*\}}|([0-9]))\s*\^\s*(?:\{{\s*([0-9]+)\s*\}}|([0-9]))"
)
"""Matches binomial coefficients with a C: `_8C_4`, `^8C_4`, `C_8^4`, but not `x^2C_4`."""
_WHOLE_BOLD = re.compile(r"\\(?:mathbf|boldsymbol|bm|mathit)\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_NAME = re.compile(r"\s*\\?[A-Za-z]+\s*")
_ROW_SPACE = re.compile(r"\\\\\s*\[\s*-?[0-9.]+\s*(?:pt|em|ex|mm|cm)\s*\]")
_ALIGNED = re.compile(r"\\begin\{(aligned|align\*?|gathered|split)\}(?P<rows>.*?)\\end\{\1\}", re.DOTALL)
_WORDS_OF_MODULUS = re.compile(rf"{_TEXT}\s*\(?\s*mod\s*([0-9]+)\s*\)?\s*\}}")
_BASE_IN_WORDS = re.compile(
    rf"(?<![\w.])([0-9][0-9A-F]*){_GAP}(?:{_TEXT}\s*)?\(?\s*(?:in\s+)?base(?:\}}|\s|\\[,; ])*"
    r"([0-9]{1,2})\s*\)?\s*\}?"
)
"""Matches a number with its base in words: `1011 base 2`, `1011\\text{ (base 2)}`."""
_BASE_IN_BRACKETS = re.compile(
    r"(?<=[0-9A-F])_\s*\{\s*(?:\(\s*([0-9]{1,2})\s*\)"
    rf"|\(?\s*{_TEXT}\s*\(?base\s*\}}?\s*([0-9]{{1,2}})\s*\)?\s*\}}?\s*\)?)\s*\}}"
)
_EXCEPTION = re.compile(
    rf"(?:{_TEXT}\s*)?all\s+real\s*(?:numbers?|values)?{_BETWEEN_WORDS}(?P<name>[a-z]?){_BETWEEN_WORDS}"
    rf"(?:except(?:\s+for)?|other\s+than|excluding|besides){_BETWEEN_WORDS}(?:[a-z]\s*=\s*)?"
    rf"(?P<value>(?=[^}}]*(?:[0-9]|\\pi))(?:[-+0-9./,\s]|\\frac|\\sqrt|\\pi|{_TEXT}|[{{}}]|\b(?:and|or)\b)*(?:[0-9}}]|\\pi))\s*",
    re.IGNORECASE,
)
"""Matches all real numbers without some: `all real numbers except 0`."""
_WORD_BETWEEN = re.compile(rf"{_TEXT}\s*,?\s*(?:and|or)\s*\}}|\b(?:and|or)\b")
_CONDITION_FOR_ALL = re.compile(
    rf"(?:{_TEXT}\s*)?(?:for\s+)?all\s+(?:real\s+)?(?:(?:numbers|values\s+of)\s+)?(?:\}}\s*)?"
    r"(?=[a-z]\s*(?:[<>]|\\[lg]e|\\ne))",
    re.IGNORECASE,
)
_CONSTANT = re.compile(
    rf"{_GAP}[,;]?{_GAP}\(?(?:{_TEXT})?\s*+[,(]?\s*+where{_BETWEEN_WORDS}(?P<name>[A-Z]){_BETWEEN_WORDS}"
    r"is\s+(?:an?|the|any)\s+(?:arbitrary\s+|real\s+|integration\s+)?constant(?:\s+of\s+integration)?[\s)}.]*$"
)
"""Matches `where C is a constant` at the end."""
_ROUNDED_UNIT = re.compile(
    r"\s*(\\(?:text|mathrm)\s*\{[^{}]*\}(?:\s*\^\s*\{?[23]\}?)?)\s*(\\approx(?![A-Za-z]).*)\1$", re.DOTALL
)
_BRACKETED_UNIT = re.compile(
    rf"(?<=[0-9}}]){_GAP}[(\[]\s*(\\(?:text|mathrm)\s*\{{\s*(?!or\b|and\b|not\b|mod\b)[A-Za-z]+\s*\}}"
    r"(?:\s*\^\s*\{?[23]\}?)?)\s*[)\]]$"
)
_MONEY = re.compile(
    rf"^(?:US\s*(?=\\?\$)|{_TEXT}\s*USD\s+(?P<price>[0-9][0-9.,]*)\s*\}}$|(?:{_TEXT})?\s*USD\s*\}}?{_GAP}(?=[0-9]))"
)


def expand_root_signs(text: str) -> str:
    r"""Return the text with roots as commands: `√11` is `\sqrt{11}`."""
    return _ROOT.sub(lambda root: _ROOT_COMMANDS[root[1]] + (f"{{{root[2]}}}" if root[2] else ""), text)


def rewrite_notation(text: str) -> str:
    """Return a text of ASCII signs with rarer notations replaced by those of the parser."""
    if "\\" in text:
        text = _rewrite_commands(text)
    if "[" in text or "]" in text:
        text = _REVERSED_INTERVAL.sub(_turn_brackets, text)
    if "U" in text:
        text = _LETTER_OF_UNION.sub(r"\1\\cup ", text)
    if "C" in text:
        text = _COMBINATIONS.sub(_write_binomial, text)
    if "_" in text:
        text = _BASE_IN_BRACKETS.sub(lambda base: f"_{{{base[1] or base[2]}}}", text)
    if "base" in text:
        text = _BASE_IN_WORDS.sub(r"\1_{\2}", text)
    if "all" in text or "All" in text:
        exception = _EXCEPTION.fullmatch(text)
        text = _exclude(exception["value"]) if exception else _CONDITION_FOR_ALL.sub("", text, count=1)
    if (
        "where" in text
        and "constant" in text
        and (constant := _CONSTANT.search(text))
        and constant["name"] in text[: constant.start()]
    ):
        text = text[: constant.start()]
    return _MONEY.sub(_write_dollars, text) if "US" in text else text


def _rewrite_commands(text: str) -> str:
    if r"\rm" in text:
        text = _OLD_FONT.sub(_write_new_font, text)
    if r"\begin" in text:
        text = _ALIGNED.sub(_write_statements, _ROW_SPACE.sub(r"\\\\", text))
    bold = _WHOLE_BOLD.fullmatch(text)
    text = bold[1] if bold and not _NAME.fullmatch(bold[1]) else text
    if "^" in text:
        text = _NESTED_UNIT.sub(lambda unit: _BRACED_EXPONENT.sub(r"^\1", unit[0]), text)
    if "mod" in text:
        text = _WORDS_OF_MODULUS.sub(r"\\pmod{\1}", text)
    if r"\approx" in text:
        text = _ROUNDED_UNIT.sub(r"\2\1", text)
    return _BRACKETED_UNIT.sub(r"\\,\1", text) if text[-1:] in (")", "]") else text


def _write_new_font(font: re.Match[str]) -> str:
    words = font[1] or font[2]
    # Sums and equations have no words.
    if re.search("[+=]", words or ""):
        return words
    return rf"\mathrm{{{words.strip()}}}" if words else ""


def _write_statements(lines: re.Match[str]) -> str:
    return lines["rows"].replace("&", "").strip().removesuffix(r"\\")


def _exclude(values: str) -> str:
    values = _WORD_BETWEEN.sub(",", values)
    # In a \text{} the last brace closes the words.
    is_closed = values.count("}") > values.count("{")
    return rf"\mathbb{{R}}\setminus\{{{values[:-1] if is_closed else values}\}}"


def _write_dollars(money: re.Match[str]) -> str:
    return rf"\${money['price'] or ''}" if "USD" in money[0] else ""


def _write_binomial(combinations: re.Match[str]) -> str:
    over, under = (number for number in combinations.groups() if number is not None)
    # C_1^2 is the square of C_1.
    return rf"\binom{{{over}}}{{{under}}}" if int(over) > int(under) else combinations[0]


def _turn_brackets(interval: re.Match[str]) -> str:
    if interval["from"]:
        return f"[{interval['from']},{interval['to']})"
    return f"({interval['low']},{interval['high']}{']' if interval['close'] == ']' else ')'}"
