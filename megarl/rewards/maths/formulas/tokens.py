"""Tokens of a formula: numbers with their exact value, letters, words, commands, texts, signs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from megarl.rewards.maths.numbers import COMMA, NotMathematicsError, read_based_number, read_number

MAX_TOKENS = 600


@dataclass(frozen=True, slots=True)
class Token:
    """Token of a formula. `kind` is number, numeral (with a base), letter, word, command, text, sign or end.

    `start` is its index in the text.
    """

    kind: str
    text: str
    start: int
    has_space: bool = False
    """Whether a space precedes the token."""
    number: Fraction | None = None
    origin: str = ""
    """The whole word, if this token is its first letter; else empty."""
    is_bold: bool = False


FUNCTION_WORDS = frozenset(
    """
    sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh coth log ln lg exp sqrt max min gcd lcm mod det
    cis abs floor ceiling arcsinh arccosh arctanh
    """.split()  # noqa: SIM905
)
"""Function names that answers may write without a backslash."""
_OTHER_NAMES = {
    "tg": "tan", "ctg": "cot", "cotg": "cot", "arctg": "arctan", "arcctg": "arccot", "asin": "arcsin", "acos": "arccos",
    "atan": "arctan", "cosec": "csc", "ceil": "ceiling", "arsinh": "arcsinh", "arcosh": "arccosh", "artanh": "arctanh",
    "asinh": "arcsinh", "acosh": "arccosh", "atanh": "arctanh",
}  # fmt: skip
"""Functions with another name."""
_CONSTANT_WORDS = {"pi": "pi", "infinity": "infty", "inf": "infty", "oo": "infty", "theta": "theta"}
_COMMAND = re.compile(r"\\([A-Za-z]+|.)", re.DOTALL)
_WORD = re.compile(r"[A-Za-z]+")
_TEXTUAL = frozenset(("text", "textbf", "textit", "textrm", "textsf", "texttt", "mbox", "hbox", "operatorname"))
_UPRIGHT = frozenset(("mathrm", "mathbf", "mathit", "mathsf", "boldsymbol", "bm"))
_BOLD = frozenset(("mathbf", "boldsymbol", "bm"))
_ARGUMENT = re.compile(r"\*?\s*\{([^{}]*)\}")
_MATHEMATICAL_TEXT = re.compile(
    r"[\s()]*(?:(?:[A-Z]|[IVX]+)(?:\s*[,)(&]+\s*|\s+and\s+|\s+or\s+))+(?:[A-Z]|[IVX]+)[\s()]*|[\s\d.,=+*/()<>-]*\d[^A-Za-z]*"
)
r"""Matches mathematical contents of a \text{}: letters of choices, or numbers."""
_SPACES = frozenset((",", "!", " ", "\n", "/"))


def tokenize(text: str, *, groups: bool = True) -> list[Token]:
    """Split a normalised text into tokens, ending with a token of kind `end`.

    With `groups`, `1,234` outside brackets is one number, otherwise a list. Raises NotMathematicsError beyond the
    limits of size.
    """
    tokens: list[Token] = []
    position = depth = 0
    has_space = False
    while position < len(text):
        character = text[position]
        if character.isspace() or character == "~":
            position, has_space = position + 1, True
            continue
        if character == "\\" and text[position + 1 : position + 2] in _SPACES:
            position, has_space = position + 2, True
            continue
        if len(tokens) >= MAX_TOKENS:
            raise NotMathematicsError("the formula has more than MAX_TOKENS tokens")
        # Only ASCII digits: int() would also accept digits of other scripts.
        if (character.isascii() and character.isdigit()) or (
            character == "." and text[position + 1 : position + 2].isdigit()
        ):
            # Within brackets, 1,234 is a pair or an interval.
            separator = COMMA if groups and depth == 0 else None
            token, position = _read_number_token(text, position, has_space=has_space, separator=separator)
            tokens.append(token)
        elif character == "\\":
            position = _append_command_token(text, position, has_space, tokens)
        elif character.isalpha():
            word = _WORD.match(text, position)
            if word is None:
                raise NotMathematicsError(f"the letter {character!r} is not an ASCII letter")
            tokens.append(_make_word_token(word[0], position, has_space))
            position = word.end()
        else:
            if text.startswith("...", position):
                tokens.append(Token("command", "ldots", position, has_space))
                position += 3
            # Directly after an operand, as in 5!=120, the ! is a factorial.
            elif text.startswith("!=", position) and (has_space or not tokens):
                tokens.append(Token("command", "ne", position, has_space))
                position += 2
            elif text.startswith("**", position):
                tokens.append(Token("sign", "^", position, has_space))
                position += 2
            else:
                tokens.append(Token("sign", character, position, has_space))
                depth += (character in "([") - (character in ")]")
                position += 1
        has_space = False
    tokens.append(Token("end", "", len(text), has_space))
    return tokens


def _make_word_token(word: str, position: int, has_space: bool) -> Token:
    word = _OTHER_NAMES.get(word, word) if len(word) > 2 else word
    if word in FUNCTION_WORDS:
        return Token("command", word, position, has_space)
    if word.lower() in _CONSTANT_WORDS:
        return Token("command", _CONSTANT_WORDS[word.lower()], position, has_space)
    return Token("letter" if len(word) == 1 else "word", word, position, has_space)


def _append_command_token(text: str, position: int, has_space: bool, tokens: list[Token]) -> int:
    """Append the token of the LaTeX command at `position` to `tokens`. Returns the position after it."""
    command = _COMMAND.match(text, position)
    if command is None:
        raise NotMathematicsError("the text ends with a lone backslash")
    name = _OTHER_NAMES.get(command[1], command[1])
    argument = _ARGUMENT.match(text, command.end())
    if name in _TEXTUAL | _UPRIGHT and argument is not None:
        content = argument[1].strip()
        content = _OTHER_NAMES.get(content, content)
        # Upright letters are variables, but in \text only e and i are.
        if re.fullmatch("[A-Za-z]" if name in _UPRIGHT else "[ei]", content):
            tokens.append(Token("letter", content, position, has_space, is_bold=name in _BOLD))
        elif _MATHEMATICAL_TEXT.fullmatch(content):
            start = argument.start(1)
            # Choices or numbers in \text are mathematics, so tokenize them.
            tokens.extend(
                Token(token.kind, token.text, start + token.start, token.has_space, token.number)
                for token in tokenize(argument[1])[:-1]
            )
        elif content in FUNCTION_WORDS:
            tokens.append(Token("command", content, position, has_space))
        elif content.lower() == "infinity":
            tokens.append(Token("command", "infty", position, has_space))
        elif content:
            tokens.append(Token("text", content, position, has_space))
        return argument.end()
    if name == "mathbb":
        argument = argument or re.compile(r"\s+([A-Z])").match(text, command.end())
        if argument is None:
            raise NotMathematicsError(r"the command \mathbb has no letter as its argument")
        tokens.append(Token("command", f"mathbb{argument[1].strip()}", position, has_space))
        return argument.end()
    kind = "sign" if name in "{}%$#&_|" or name == "\\" else "command"
    tokens.append(Token(kind, "\\" + name if kind == "sign" else name, position, has_space))
    return command.end()


def _read_number_token(text: str, position: int, *, has_space: bool, separator: str | None) -> tuple[Token, int]:
    # After ^ or _ an index is not a base: 2^3_1, R_1C_1.
    in_base = read_based_number(text, position) if text[position - 1 : position] not in ("^", "_") else None
    number_and_end = in_base or read_number(text, position, separator)
    if number_and_end is None:
        raise NotMathematicsError(f"there is no number before {text[position:]!r:.20}")
    value, end = number_and_end
    return Token("numeral" if in_base else "number", text[position:end], position, has_space, value), end
