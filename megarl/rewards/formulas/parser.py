"""Parser of mathematical answers in LaTeX or plain text. It rejects anything unknown."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from megarl.rewards.formulas.atoms import Atoms, is_product
from megarl.rewards.formulas.nodes import BLANK, Node, joined, negative, number
from megarl.rewards.formulas.tokens import NotMathematicsError, Token, tokenized

ReadUnit = Callable[[str, bool], tuple[bool, Any]]
"""Function returning whether a text is a unit, and the unit. Its second argument: whether a space precedes the text."""

_RELATIONS = {
    "=": "=", "<": "<", ">": ">", "le": "<=", "ge": ">=", "ne": "!=", "in": "in", "notin": "notin", "approx": "approx",
    "simeq": "approx", "sim": "sim", "to": "to", "equiv": "equiv", "cong": "cong", "subset": "subset", "not": "not",
    "subseteq": "subseteq", "propto": "propto", "perp": "perp", "parallel": "parallel", "Rightarrow": "=>",
    "mapsto": "mapsto",
}  # fmt: skip
_UNIT_FRACTION = re.compile(r"\\frac\s*\{\s*\\(?:text|mathrm)")
_SET_SIGNS = {"cup": "cup", "cap": "cap", "setminus": "setminus", "backslash": "setminus"}
_CONNECTIVES = {",": ",", ";": ",", "and": "and", "or": "or"}


def parsed(text: str, read_unit: ReadUnit | None = None, *, groups: bool = True) -> Node | None:
    """Parse a normalised text into a syntax tree. None: the text is not a formula.

    `read_unit` parses a unit at the end of the text. `groups`: `1,234` outside brackets is one number.
    """
    try:
        return _Parser(text, read_unit, groups=groups).whole()
    except (NotMathematicsError, RecursionError, ZeroDivisionError):
        return None


class _Parser(Atoms):
    """Parser of statements, relations, sums and products. Its base class `Atoms` parses operands."""

    def __init__(self, text: str, read_unit: ReadUnit | None, *, groups: bool) -> None:
        super().__init__(text, _with_single_letters(tokenized(text, groups=groups)))
        self._read_unit = read_unit

    def whole(self) -> Node:
        """Parse the whole text: one formula or a list of several, optionally with a unit at the end."""
        node = self.items()
        if _has_words(node):
            raise NotMathematicsError("the text contains words outside a formula")
        unit = self._unit_here()
        if unit is not None:
            return Node("quantity", (node,), unit[0]) if unit[0] is not None else node
        if self.token.kind != "end":
            raise NotMathematicsError(f"the formula is complete before {self.token.text!r}, but more text follows")
        return node

    def items(self) -> Node:
        found = [self.relation()]
        connective = ""
        while (sign := self._connective()) is not None:
            # "or" anywhere makes the list alternatives; commas before it only separate.
            connective = "or" if "or" in (sign, connective) else "and" if "and" in (sign, connective) else ","
            found.append(self.relation())
        return Node("list", tuple(found), connective) if connective else found[0]

    def _connective(self) -> str | None:
        if self.token.text in ("&", "\\&") and not self.brackets:
            self.advance()
            return "and"
        found = _CONNECTIVES.get(self.token.text) if self.token.kind in ("sign", "word", "text") else None
        # ", and" is one connective.
        while self.token.kind in ("sign", "word", "text") and self.token.text in _CONNECTIVES:
            found = found if self.token.text in ",;" else _CONNECTIVES[self.token.text]
            self.advance()
        return found

    def relation(self) -> Node:
        self._skip_label()
        if (sign := self._relation_sign()) is not None:
            node = self.set_expression()
            # "= 5" is an answer with the left side omitted.
            return node if sign == "=" else Node("relation", (BLANK, node), (sign,))
        parts = [self.set_expression()]
        # Within a set's braces, a colon begins the condition.
        if self.token.text == ":" and self.bars == 0:
            return self._ratio(parts)
        signs: list[str] = []
        while (sign := self._relation_sign()) is not None:
            signs.append(sign)
            parts.append(self.set_expression())
        return Node("relation", tuple(parts), tuple(signs)) if signs else parts[0]

    def _skip_label(self) -> None:
        """Skip words before a colon, as in `Answer: 12`."""
        following = self.following()
        if self.token.kind == "text" and self.token.text.endswith(":") and len(self.token.text) > 3:
            self.advance()
        elif self.token.kind == "text" and following.text == ":" and len(self.token.text) > 2:
            self.advance()
            self.advance()

    def _relation_sign(self) -> str | None:
        if self.token.kind not in ("sign", "command") or self.token.text not in _RELATIONS:
            return None
        sign = _RELATIONS[self.token.text]
        self.advance()
        return sign

    def _ratio(self, parts: list[Node]) -> Node:
        while self.token.text == ":":
            self.advance()
            parts.append(self.set_expression())
        return Node("ratio", tuple(parts))

    def set_expression(self) -> Node:
        node = self.sum()
        while self.token.kind == "command" and self.token.text in _SET_SIGNS:
            sign = _SET_SIGNS[self.token.text]
            self.advance()
            node = Node("setop", (node, self.sum()), sign)
        return node

    def sum(self) -> Node:
        self.descend()
        terms = [self._signed_term(is_first=True)]
        while self._is_sign():
            terms.append(self._signed_term(is_first=False))
        self.ascend()
        return joined("sum", terms)

    def _is_sign(self) -> bool:
        return self.token.text in ("+", "-") or (self.token.kind == "command" and self.token.text in ("pm", "mp"))

    def _signed_term(self, *, is_first: bool) -> Node:
        if not self._is_sign():
            return self._term()
        sign = self.token.text
        self.advance()
        # +-5 and --5 have a sign of their own after the operator.
        if not is_first and self.token.text in ("+", "-"):
            return self._with_sign(sign, self._signed_term(is_first=True))
        return self._with_sign(sign, self._term())

    def _with_sign(self, sign: str, node: Node) -> Node:
        if sign == "+":
            return node
        return negative(node) if sign == "-" else Node("sign", (node,), 1 if sign == "pm" else -1)

    def _term(self) -> Node:
        node = self._factor_or_mixed()
        if node.kind == "words":
            return node
        while True:
            if self.token.text in ("*", "cdot", "times") and self.token.kind in ("sign", "command"):
                self.advance()
                node = joined("product", [node, self._signed_factor()])
            elif self.token.text in ("/", "div"):
                self.advance()
                node = Node("quotient", (node, self._signed_factor()))
            # A letter after a number may begin its unit instead of another factor.
            elif self.starts_factor() and not self._has_unit_here():
                # Two numbers in a row are a typo or a list, except when the second begins a power: 2 3^2.
                if self.token.kind == "number" and not (self.token.spaced and self.following().text == "^"):
                    raise NotMathematicsError("two numbers follow each other without an operator")
                node = joined("product", [node, self.power()])
            else:
                return node

    def _signed_factor(self) -> Node:
        if self.token.text in ("+", "-"):
            sign = self.token.text
            self.advance()
            return self._with_sign(sign, self.power())
        return self.power()

    def _factor_or_mixed(self) -> Node:
        r"""Parse a factor of a product, or a mixed number like `3 1/2` or `3\frac12`."""
        first, second = self.token, self.following()
        is_whole = first.kind == "number" and first.text.isdigit()
        if is_whole and second.kind == "command" and second.text == "frac" and not self._is_unit_at(second):
            self.advance()
            part = self.power()
            if part.kind == "quotient" and all(each.kind == "number" for each in part.parts):
                return self._mixed(first, part)
            return joined("product", [number(first.number or 0), part])
        if is_whole and second.kind == "number" and second.spaced and second.text.isdigit():
            self.advance()
            self.advance()
            slash = self.token.text
            self.advance()
            if slash != "/" or self.token.kind != "number" or not self.token.text.isdigit():
                raise NotMathematicsError("two numbers follow each other without an operator")
            part = Node("quotient", (number(second.number or 0), number(self.token.number or 0)))
            self.advance()
            return self._mixed(first, part)
        return self.power()

    def _mixed(self, whole: Token, part: Node) -> Node:
        over, under = (each.value for each in part.parts)
        # 3 5/2 is not a mixed number, and reading it as a product would guess.
        if not 0 <= over < under:
            raise NotMathematicsError("the fraction of a mixed number is not between 0 and 1")
        return number((whole.number or 0) + over / under)

    def _is_unit_at(self, token: Token) -> bool:
        return _UNIT_FRACTION.match(self.source, token.start) is not None

    def _has_unit_here(self) -> bool:
        return self._unit_here() is not None

    def _unit_here(self) -> tuple[Any] | None:
        """Return the unit that the remaining text consists of, in a tuple of one. None: the text is not a unit."""
        token = self.token
        if self._read_unit is None or self.brackets or token.kind == "end":
            return None
        # A LaTeX space or command separates like a space.
        is_spaced = token.spaced or self.source[token.start] == "\\"
        is_candidate = (
            token.kind == "text"
            # A single letter directly after a number is a variable, as in 5m.
            or (token.kind in ("letter", "word") and (is_spaced or len(token.origin or token.text) > 1))
            or token.text in ("%", "\\%", "\\$")
            or (token.text == "frac" and self._is_unit_at(token))
        )
        if not is_candidate:
            return None
        is_unit, unit = self._read_unit(self.source[token.start :], token.kind == "text" or is_spaced)
        return (unit,) if is_unit else None


def _has_words(node: Node) -> bool:
    """Return whether a formula contains words, apart from a name before an equals sign."""
    if node.kind == "relation" and node.parts[0].kind == "words":
        return any(_has_words(part) for part in node.parts[1:])
    return node.kind == "words" or any(_has_words(part) for part in node.parts)


def _with_single_letters(tokens: list[Token]) -> list[Token]:
    """Return the tokens, with products of variables like `xy` split into single letters."""
    found: list[Token] = []
    for token in tokens:
        if token.kind == "word" and is_product(token.text):
            for place, letter in enumerate(token.text):
                # The first letter remembers the word, in case it turns out to be a unit.
                origin = "" if place else token.text
                found.append(Token("letter", letter, token.start + place, token.spaced and not place, origin=origin))
        else:
            found.append(token)
    return found
