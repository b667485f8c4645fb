r"""Rewriting of rarer notations into those of the parser: `]0,1[`, `{\rm cm}`, `\text{(mod 7)}`, `1011 base 2`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

TEXT_COMMANDS = (
    "text|textbf|textit|textrm|textsf|texttt|mathrm|mathbf|mathit|mathsf|mbox|hbox|operatorname|boldsymbol|bm"
)
TEXT = rf"\\(?:{TEXT_COMMANDS})\s*\{{"
"""Matches the beginning of words in a formula: `\\text{`."""
# Both are possessive: with backtracking, a long row of spaces would take cubic time.
_GAP = r"(?:[\s~]|\\[,; ]|\\q?quad)*+"
_BETWEEN_WORDS = rf"(?:[\s{{}}$]|{TEXT})*+"
_SPACE = rf"(?:[\s~,{{}}]|\\[,; ]|{TEXT})++"
_END_OF_WORDS = r"[\s.,;}]*\Z"

_BOX = r"\\(?:boxed|fbox)\s*\{"
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉ₙ", "0123456789n")
_ROOT_COMMANDS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}
_BRACED_EXPONENT = re.compile(r"\^\s*\{\s*(-?[0-9])\s*\}")
_END = (
    r"\s*(?:[-+]?\s*(?:[0-9][0-9./]*|\\infty)|[-+]?[a-z]|[-+]?\s*\\frac\s*\{[0-9]+\}\s*\{[0-9]+\}"
    r"|[-+]?[0-9]*\\sqrt\s*\{?[0-9]+\}?|[-+]?[0-9]*\\pi|[-+]?\\frac\s*\{[0-9]*\\pi\s*\}\s*\{[0-9]+\})\s*"
)
_INTERVAL = r"[(\[][^()\[\],]*,[^()\[\],]*[)\]]"
_C = r"(?:\\mathrm\s*\{\s*C\s*\}|C)"
_MONTH = (
    "(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    "|Nov(?:ember)?|Dec(?:ember)?)"
)
_DAY = r"(?:[12][0-9]|3[01]|0?[1-9])"
_NO_UNIT = r"(?:or|and|not|mod)\b"
_BARE_SCRIPT = re.compile(r"[_^]\s*[0-9]+\Z")
_WORD_BETWEEN = re.compile(rf"{TEXT}\s*,?\s*(?:and|or)\s*\}}|\b(?:and|or)\b")


class Rule(NamedTuple):
    """A notation, and its replacement as a template or a function."""

    pattern: re.Pattern[str]
    replacement: str | Callable[[re.Match[str]], str]


def rewrite_notation(text: str) -> str:
    """Return a text with normalised signs and commands, and with rarer notations replaced by those of the parser."""
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def _rule(pattern: str, replacement: str | Callable[[re.Match[str]], str], flags: re.RegexFlag = re.NOFLAG) -> Rule:
    return Rule(re.compile(pattern, flags), replacement)


def _write_root(root: re.Match[str]) -> str:
    return _ROOT_COMMANDS[root[1]] + (f"{{{root[2]}}}" if root[2] else " ")


def _write_script(script: re.Match[str]) -> str:
    if script[1]:
        return "^{" + script[1].translate(_RAISED) + "}"
    return "_{" + script[2].translate(_LOWERED) + "}"


def _write_new_font(font: re.Match[str]) -> str:
    words = font[1] or font[2]
    # Sums and equations have no words.
    if re.search("[+=]", words or ""):
        return words
    return rf"\mathrm{{{words.strip()}}}" if words else ""


def _turn_brackets(interval: re.Match[str]) -> str:
    if interval["from"]:
        return f"[{interval['from']},{interval['to']})"
    return f"({interval['low']},{interval['high']}{']' if interval['close'] == ']' else ')'}"


def _write_binomial(combinations: re.Match[str]) -> str:
    n, k = combinations["over"] or combinations["low"], combinations["under"] or combinations["high"]
    # C_1^2 and C_2^2 are the squares of constants.
    is_square = combinations["low"] is not None and int(n) == int(k) <= 2
    return rf"\binom{{{n}}}{{{k}}}" if int(n) >= int(k) and not is_square else combinations[0]


def _write_letterless(text: re.Match[str]) -> str:
    # After a script without braces, a digit would become part of it: P_1\text{2} is not P_{12}.
    is_after_script = _BARE_SCRIPT.search(text.string, 0, text.start()) is not None
    return f" {text[1]}" if is_after_script and text[1][:1].isdigit() else text[1]


def _write_exception(exception: re.Match[str]) -> str:
    values = _WORD_BETWEEN.sub(",", exception["value"])
    # In a \text{} the last brace closes the words.
    is_closed = values.count("}") > values.count("{")
    return rf"\mathbb{{R}}\setminus\{{{values[:-1] if is_closed else values}\}}"


def _write_dollars(money: re.Match[str]) -> str:
    return rf"\${money['price'] or ''}" if "USD" in money[0] else ""


def _write_meridiem(match: re.Match[str]) -> str:
    half = match[1].upper() if match[1] else "P" if match[2] else "A"
    return rf" \text{{{half}M}}"


def _write_date(date: re.Match[str]) -> str:
    month, day, year = (date[1], date[2], date[3]) if date[1] else (date[5], date[4], date[6])
    return f"{month[:3].title()} {int(day)}" + (f", {year}" if year else "")


def _write_domain(parameter: re.Match[str]) -> str:
    name = parameter["name"] or parameter["object"]
    if parameter["constant"] is None:
        return rf", {name} \in \mathbb{{Z}}"
    return "" if name in parameter.string[: parameter.start()] else parameter[0]


# The rules are applied in this order.
_RULES = (
    # A box around a part of the answer only frames it.
    _rule(_BOX, "{"),
    # Formulas in a sentence: $x<2$ or $x>5$, but not $5 and $6.
    _rule(r"(?<!\\)\$(?=\S)((?:[^$\\]|\\.)*?)(?<=\S)\$(?!\d)|\\\((.*?)\\\)", r" \1\2 "),
    # Signs, scripts and fonts.
    _rule(r"([√∛∜])\s*([0-9]+(?:\.[0-9]+)?)?", _write_root),
    _rule("([⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+)|([₀₁₂₃₄₅₆₇₈₉ₙ]+)", _write_script),
    _rule(r"\{\s*\\rm\s+([^{}\\]*)\}|\\rm\s*\{([^{}\\]*)\}|\\rm(?![A-Za-z])", _write_new_font),
    # Units: {m^{2}} in one font, after an approximation, and in brackets inside and outside of the font.
    _rule(
        rf"(?<=[0-9}}]){_GAP}\\(?:text|mathrm)\s*\{{\s*\(\s*(?!{_NO_UNIT})([A-Za-z]{{2,}})\s*\)\s*\}}$",
        r"\\,\\text{\1}",
    ),
    _rule(
        r"\\(?:text|mathrm|textrm|mbox)\s*\{(?:[^{}]|\^\s*\{[^{}]*\})*\}",
        lambda unit: _BRACED_EXPONENT.sub(r"^\1", unit[0]),
    ),
    _rule(
        r"\s*(\\(?:text|mathrm)\s*\{[^{}]*\}(?:\s*\^\s*\{?[23]\}?)?)\s*(\\approx(?![A-Za-z]).*)\1$", r"\2\1", re.DOTALL
    ),
    _rule(
        rf"(?<=[0-9}}]){_GAP}[(\[]\s*(\\(?:text|mathrm)\s*\{{\s*(?!{_NO_UNIT})[A-Za-z]+\s*\}}"
        r"(?:\s*\^\s*\{?[23]\}?)?)\s*[)\]]$",
        r"\\,\1",
    ),
    # An interval with a bracket turned outwards, so that this end is open: ]0,1[, [0,1[. Then a U as union.
    _rule(
        rf"(?:(?<![\w}})\]])|(?<=\\in)|(?<=\\cup)|(?<=\\cap))\](?P<low>{_END})[,;](?P<high>{_END})"
        rf"(?P<close>[\[\]])(?![\w{{(])|\[(?P<from>{_END})[,;](?P<to>{_END})\[(?![\w{{(])",
        _turn_brackets,
    ),
    _rule(
        rf"((?:(?<![A-TV-Za-z0-9_'}}])|(?<=\\in)){_INTERVAL})\s*(?:\\text\s*\{{\s*U\s*\}}|U)\s*(?={_INTERVAL})",
        r"\1\\cup ",
    ),
    # Binomial coefficients with a C: _8C_4, ^8C_4, C_8^4, C^4_8, but not x^2C_4.
    _rule(rf"(?<![\w}}]){_C}\s*\^\s*(\{{\s*[0-9]+\s*\}}|[0-9])\s*_\s*(\{{\s*[0-9]+\s*\}}|[0-9])", r"C_\2^\1"),
    _rule(
        rf"(?:\{{\}}|(?<![\w}})\]'!|\s]))\s*[_^]\s*\{{?\s*(?P<over>[0-9]+)\s*\}}?\s*{_C}\s*"
        r"_\s*\{?\s*(?P<under>[0-9]+)\s*\}?"
        rf"|(?<![\w}}]){_C}\s*_\s*(?=\{{?\s*(?P<low>[0-9]+))(?:\{{\s*[0-9]+\s*\}}|[0-9])\s*"
        r"\^\s*(?=\{?\s*(?P<high>[0-9]+))(?:\{\s*[0-9]+\s*\}|[0-9])",
        _write_binomial,
    ),
    # Moduli and bases: \text{(mod 7)}, 1011_{(2)}, 1011\text{ (base 2)}, (1011)_2.
    _rule(rf"{TEXT}\s*\(?\s*mod\s*([0-9]+)\s*\)?\s*\}}", r"\\pmod{\1}"),
    _rule(
        r"(?<=[0-9A-F])_\s*\{\s*(?:\(\s*([0-9]{1,2})\s*\)"
        rf"|\(?\s*{TEXT}\s*\(?base\s*\}}?\s*([0-9]{{1,2}})\s*\)?\s*\}}?\s*\)?)\s*\}}",
        r"_{\1\2}",
    ),
    _rule(
        rf"(?<![\w.])([0-9][0-9A-F]*){_GAP}(?:{TEXT}\s*)?\(?\s*(?:in\s+)?base(?:\}}|\s|\\[,; ])*"
        r"([0-9]{1,2})\s*\)?\s*\}?",
        r"\1_{\2}",
    ),
    _rule(r"\(\s*([0-9][0-9A-F]*)\s*\)(?=\s*_)", r"\1"),
    # Sets in words.
    _rule(
        rf"\A(?:{TEXT}\s*)?all\s+real\s*(?:numbers?|values)?{_BETWEEN_WORDS}(?P<name>[a-z]?){_BETWEEN_WORDS}"
        rf"(?:except(?:\s+for)?|other\s+than|excluding|besides){_BETWEEN_WORDS}(?:[a-z]\s*=\s*)?"
        rf"(?P<value>(?=[^}}]*(?:[0-9]|\\pi))(?:[-+0-9./,\s]|\\frac|\\sqrt|\\pi|{TEXT}|[{{}}]|\b(?:and|or)\b)*"
        r"(?:[0-9}]|\\pi))\s*\Z",
        _write_exception,
        re.IGNORECASE,
    ),
    _rule(
        rf"(?:{TEXT}\s*)?(?:for\s+)?all\s+(?:real\s+)?(?:(?:numbers|values\s+of)\s+)?(?:\}}\s*)?"
        r"(?=[a-z]\s*(?:[<>]|\\[lg]e|\\ne))",
        "",
        re.IGNORECASE,
    ),
    _rule(rf"\A{_BETWEEN_WORDS}all\s+(?:real\s+numbers|reals){_END_OF_WORDS}", r"\\mathbb{R}", re.IGNORECASE),
    _rule(
        rf"\A{_BETWEEN_WORDS}(?:(?:there\s+(?:is|are|exists?)\s+)?no\s+(?:real\s+)?(?:solutions?|roots?)"
        rf"(?:\s+exists?)?|(?:the\s+)?empty\s+set){_END_OF_WORDS}",
        r"\\emptyset",
        re.IGNORECASE,
    ),
    _rule(
        rf"\A{_BETWEEN_WORDS}(?:(?:the\s+limit\s+)?(?:does\s+not|doesn't)\s+exist|D\.?N\.?E){_END_OF_WORDS}",
        "DNE",
        re.IGNORECASE,
    ),
    # Decimals with a period: 0.\dot{1}2\dot{3}, 0.(12).
    _rule(r"\\dot\s*\{?(\d)\}?(\d*)\s*\\dot\s*\{?(\d)\}?", r"\\overline{\1\2\3}"),
    _rule(r"(?<=\d\.)\((\d+)\)", r"\\overline{\1}"),
    # Words around numbers: \text{-}4, 5^{th}, 3 p.m., USD 5.
    _rule(r"\\(?:text|textrm|textbf|mathrm|mathbf|mbox)\s*\{([^{}A-Za-z]*)\}", _write_letterless),
    _rule(r"(?<=\d)\s*\^\s*\{?\s*\\?(?:text|mathrm)?\s*\{?\s*(st|nd|rd|th)\s*\}?\s*\}?", r"\1"),
    _rule(
        rf"(?<=\d){_GAP}(?:{TEXT}\s*)?(?:([AaPp])(?:[Mm]|\.\s?[Mm]\.?)|(noon)|(midnight))(?![A-Za-z])\s*\}}?",
        _write_meridiem,
    ),
    _rule(
        rf"^(?:US\s*(?=\\?\$)|{TEXT}\s*USD\s+(?P<price>[0-9][0-9.,]*)\s*\}}$|(?:{TEXT})?\s*USD\s*\}}?{_GAP}(?=[0-9]))",
        _write_dollars,
    ),
    # Dates in words, and ranges: 4th of July, 1776, from 2 to 5.
    _rule(
        rf"\A{_BETWEEN_WORDS}(?:({_MONTH})\b\.?{_SPACE}({_DAY})(?:st|nd|rd|th)?(?:{_SPACE}(\d{{4}}))?"
        rf"|({_DAY})(?:st|nd|rd|th)?{_SPACE}(?:of{_SPACE})?({_MONTH})\b\.?(?:{_SPACE}(\d{{4}}))?){_END_OF_WORDS}",
        _write_date,
        re.IGNORECASE,
    ),
    _rule(rf"\A{_BETWEEN_WORDS}from[\s}}]+(?=[-\d\\])", ""),
    _rule(r"(?<![A-Za-z\\])d([a-z])\s*/\s*d([a-z])(?![A-Za-z])", r"\\frac{d\1}{d\2}"),
    # A parameter's values: (k \in Z), where k is an integer, where C is a constant.
    _rule(r"\(\s*([A-Za-z])\s*(\\in\s*\\mathbb\s*(?:\{[A-Z]\}|[A-Z]))\s*\)$", r", \1 \2"),
    _rule(rf",?\s*{TEXT}\s*,?\s*(?:where|for|with)\s*\}}\s*(?=[A-Za-z]\s*\\in(?![A-Za-z]))", ", "),
    _rule(
        r"\\in\s*(?:\\(?:mathbf|mathrm|bm)\s*)?(?:\{\s*([ZNRQC])\s*\}|([ZNRQC])(?![A-Za-z0-9_'({]))",
        r"\\in \\mathbb{\1\2}",
    ),
    _rule(
        rf"(?:[,;(]|{TEXT}\s*\(?|\b(?=where\b)){_BETWEEN_WORDS}(?:(?:where|with|for){_BETWEEN_WORDS})?"
        rf"(?:(?P<name>[A-Za-z]){_BETWEEN_WORDS}(?:(?:is\s+(?:an|any)|is|an|any)\s+integer(?![A-Za-z])"
        r"|(?P<constant>is\s+(?:an?|the|any)\s+(?:arbitrary\s+|real\s+|integration\s+)?"
        r"constant(?:\s+of\s+integration)?))"
        rf"|(?:(?:any|all|every|some|each){_BETWEEN_WORDS})?integers?(?![A-Za-z]){_BETWEEN_WORDS}(?P<object>[A-Za-z]))"
        rf"{_BETWEEN_WORDS}[).]*{_BETWEEN_WORDS}$",
        _write_domain,
    ),
    # A leading ~ means "about", not a space.
    _rule(r"\A~(?=\s*\S)", r"\\sim "),
    # Separators of thousands that cannot separate items of a list.
    _rule(r"(?<=\d)(?:\{,\}\s*|,?\\!|\\,|\\ |~)(?=\d{3}(?!\d))", ""),
)
