"""Tokens of a formula: numbers with their exact value, letters, words, commands, texts, signs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 1000
"""Maximum digits of a number in a formula, and maximum exponent of its power of ten."""
MAX_TOKENS = 600


class NotMathematicsError(ValueError):
    """Raised for a text that is not a formula known to the parser, or exceeds the limits of size."""


@dataclass(frozen=True, slots=True)
class Token:
    """Token of a formula. `kind` is number, numeral (with a base), letter, word, command, text, sign or end.

    `start` is its index in the text.
    """

    kind: str
    text: str
    start: int
    spaced: bool = False
    """Whether a space precedes the token."""
    number: Fraction | None = None
    origin: str = ""
    """The whole word, if this token is the first letter of a split word; otherwise empty."""
    is_bold: bool = False


FUNCTION_WORDS = frozenset(
    """
    sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh coth log ln lg exp sqrt max min gcd lcm mod det
    """.split()  # noqa: SIM905
)
"""Function names like sin and log. Answers may write them without a backslash."""
_CONSTANT_WORDS = {"pi": "pi", "infinity": "infty", "inf": "infty", "oo": "infty", "theta": "theta"}
_GROUPED = r"[1-9]\d{0,2}(?:,\d{3})+(?![\d,])"
_PLAIN = r"\d+"
_REPEATING = re.compile(
    r"(?P<fixed>\d*\.\d*)(?:\\overline|\\bar|\\dot)\s*(?:\{\s*(?P<braced>\d+)\s*\}|(?P<bare>\d))(?!\d)"
    r"|(?P<dotted>\d*\.\d*?(?P<once>\d+?)(?P=once)+)(?:\s*\\ldots(?![A-Za-z])|\.\.\.)",
    re.ASCII,
)
_IN_BASE = re.compile(
    r"(?P<digits>\d[0-9A-F]*)_\s*(?:(?P<one>\d{1,2})(?!\d)"
    r"|\{\s*(?:\\(?:text|mathrm)\s*\{)?\s*(?P<base>\d{1,2}|[a-z]+)\s*\}{1,2}|(?P<name>ten|two)\b)",
    re.ASCII,
)
_BASE_NAMES = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11,
    "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16,
}  # fmt: skip
_NUMBER = {
    commas: re.compile(
        rf"(?:{_GROUPED + '|' if commas else ''}{_PLAIN})?(?:\.\d+)?(?:(?<=\d)\.(?![\d.]))?"
        r"(?:(?<=\d)[eE][+-]?\d+(?![\d.A-Za-z]))?",
        re.ASCII,
    )
    for commas in (True, False)
}
_COMMAND = re.compile(r"\\([A-Za-z]+|.)", re.DOTALL)
_WORD = re.compile(r"[A-Za-z]+")
_TEXTUAL = frozenset(("text", "textbf", "textit", "textrm", "textsf", "texttt", "mbox", "hbox", "operatorname"))
_UPRIGHT = frozenset(("mathrm", "mathbf", "mathit", "mathsf", "boldsymbol", "bm"))
_BOLD = frozenset(("mathbf", "boldsymbol", "bm"))
_ARGUMENT = re.compile(r"\*?\s*\{([^{}]*)\}")
_MATHEMATICAL_TEXT = re.compile(
    r"[\s()]*(?:[A-Z](?:\s*[,)(&]+\s*|\s+and\s+|\s+or\s+))+[A-Z][\s()]*|[\s\d.,=+*/()<>-]*\d[^A-Za-z]*"
)
r"""Regular expression of contents of a \text{} that are read as mathematics: letters of choices, or numbers."""
_SPACES = frozenset((",", "!", " ", "\n", "/"))


def tokenized(text: str, *, groups: bool = True) -> list[Token]:
    """Split a normalised text into tokens, ending with one of kind `end`.

    `groups`: `1,234` outside brackets is one number, otherwise a list. Raises NotMathematicsError beyond the limits of
    size.
    """
    found: list[Token] = []
    position = depth = 0
    spaced = False
    while position < len(text):
        character = text[position]
        if character.isspace() or character == "~":
            position, spaced = position + 1, True
            continue
        if character == "\\" and text[position + 1 : position + 2] in _SPACES:
            position, spaced = position + 2, True
            continue
        if len(found) >= MAX_TOKENS:
            raise NotMathematicsError("the formula has more than MAX_TOKENS tokens")
        # Only ASCII digits: int() would also accept digits of other scripts.
        if (character.isascii() and character.isdigit()) or (
            character == "." and text[position + 1 : position + 2].isdigit()
        ):
            # Within brackets, 1,234 is a pair or an interval.
            token, position = _number(text, position, spaced, groups=groups and depth == 0)
            found.append(token)
        elif character == "\\":
            position = _command(text, position, spaced, found)
        elif character.isalpha():
            word = _WORD.match(text, position)
            if word is None:
                raise NotMathematicsError(f"the letter {character!r} is not an ASCII letter")
            found.append(_word(word[0], position, spaced))
            position = word.end()
        else:
            if text.startswith("...", position):
                found.append(Token("command", "ldots", position, spaced))
                position += 3
            # Without a space before it, as in 5!=120, the ! is a factorial.
            elif text.startswith("!=", position) and spaced:
                found.append(Token("command", "ne", position, spaced))
                position += 2
            elif text.startswith("**", position):
                found.append(Token("sign", "^", position, spaced))
                position += 2
            else:
                found.append(Token("sign", character, position, spaced))
                depth += (character in "([") - (character in ")]")
                position += 1
        spaced = False
    found.append(Token("end", "", len(text), spaced))
    return found


def _word(word: str, position: int, spaced: bool) -> Token:
    if word in FUNCTION_WORDS:
        return Token("command", word, position, spaced)
    if word.lower() in _CONSTANT_WORDS:
        return Token("command", _CONSTANT_WORDS[word.lower()], position, spaced)
    return Token("letter" if len(word) == 1 else "word", word, position, spaced)


def _command(text: str, position: int, spaced: bool, found: list[Token]) -> int:
    """Append the token of the LaTeX command at `position` to `found`. Returns the position after the command."""
    command = _COMMAND.match(text, position)
    if command is None:
        raise NotMathematicsError("the text ends with a lone backslash")
    name = command[1]
    argument = _ARGUMENT.match(text, command.end())
    if name in _TEXTUAL | _UPRIGHT and argument is not None:
        content = argument[1].strip()
        # Upright letters are variables, but in \text only e and i are.
        if re.fullmatch("[A-Za-z]" if name in _UPRIGHT else "[ei]", content):
            found.append(Token("letter", content, position, spaced, is_bold=name in _BOLD))
        elif _MATHEMATICAL_TEXT.fullmatch(content):
            start = argument.start(1)
            # Choices or numbers in \text are mathematics, so tokenize them.
            found.extend(
                Token(token.kind, token.text, start + token.start, token.spaced, token.number)
                for token in tokenized(argument[1])[:-1]
            )
        elif content in FUNCTION_WORDS:
            found.append(Token("command", content, position, spaced))
        elif content:
            found.append(Token("text", content, position, spaced))
        return argument.end()
    if name == "mathbb":
        argument = argument or re.compile(r"\s+([A-Z])").match(text, command.end())
        if argument is None:
            raise NotMathematicsError(r"the command \mathbb has no letter as its argument")
        found.append(Token("command", f"mathbb{argument[1].strip()}", position, spaced))
        return argument.end()
    kind = "sign" if name in "{}%$#&_|" or name == "\\" else "command"
    found.append(Token(kind, "\\" + name if kind == "sign" else name, position, spaced))
    return command.end()


def _number(text: str, position: int, spaced: bool, *, groups: bool) -> tuple[Token, int]:
    # After ^ an index is not a base: 2^3_1.
    if text[position - 1 : position] != "^" and (match := _IN_BASE.match(text, position)):
        return Token("numeral", match[0], position, spaced, _in_base(match)), match.end()
    if match := _REPEATING.match(text, position):
        # 0.33... may be a rounded decimal, so a single digit must occur three times.
        repeats = match["dotted"] is None or len(match["once"]) > 1 or match["dotted"].endswith(match["once"] * 3)
        if repeats and match.end() - match.start() <= MAX_DIGITS:
            return Token("number", match[0], position, spaced, _repeating(match)), match.end()
    match = _NUMBER[groups].match(text, position)
    assert match is not None
    return Token("number", match[0], position, spaced, decimal(match[0])), match.end()


def decimal(text: str) -> Fraction:
    """Return the value of a decimal number like `1,234.5` or `1.5e3`. Raises NotMathematicsError beyond
    MAX_DIGITS.
    """
    exponent = re.split("[eE]", text)[1:]
    if len(text) > MAX_DIGITS or (exponent and (len(exponent[0]) > 5 or abs(int(exponent[0])) > MAX_DIGITS)):
        raise NotMathematicsError("a number has more than MAX_DIGITS digits, or a too large power of ten")
    return Fraction(text.replace(",", ""))


def _in_base(match: re.Match[str]) -> Fraction:
    named = match["one"] or match["base"] or match["name"]
    base = int(named) if named.isdigit() else _BASE_NAMES.get(named, 0)
    if not 2 <= base <= 36 or len(match["digits"]) > MAX_DIGITS:
        raise NotMathematicsError(f"a number in base {named} has too many digits, or the base is not one of 2 to 36")
    try:
        return Fraction(int(match["digits"], base))
    except ValueError:
        raise NotMathematicsError(f"{match['digits']} is not a number in base {base}") from None


def _repeating(match: re.Match[str]) -> Fraction:
    r"""Return the value of a repeating decimal: `0.1\overline{6}`, `0.1\bar6` or `0.1666...`.

    Before `...` a digit must occur three times, or a group of digits twice.
    """
    fixed, repeated = match["fixed"], match["braced"] or match["bare"]
    if match["dotted"] is not None:
        repeated = match["once"]
        fixed = match["dotted"]
        while fixed.endswith(repeated):
            fixed = fixed.removesuffix(repeated)
    whole, _, decimals = fixed.partition(".")
    start = Fraction(int(whole + decimals or "0"), 10 ** len(decimals))
    return start + Fraction(int(repeated), 10 ** len(repeated) - 1) / 10 ** len(decimals)
