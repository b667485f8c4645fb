"""Parser of mathematical answers in LaTeX or plain text. It rejects anything unknown."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from megarl.rewards.maths.formulas.commands import MODULUS_COMMANDS
from megarl.rewards.maths.formulas.digit_groups import DigitGroups
from megarl.rewards.maths.formulas.items import connect_items, make_congruence
from megarl.rewards.maths.formulas.letters import split_products
from megarl.rewards.maths.formulas.nodes import BLANK, Node, join_operands, negative, number, symbol
from megarl.rewards.maths.formulas.tokens import Token, tokenize
from megarl.rewards.maths.numbers import NotMathematicsError

ReadUnit = Callable[[str, bool], tuple[bool, Any]]
"""Function (text, whether a space precedes it) -> (whether it is a unit, the unit)."""

_RELATIONS = {
    "=": "=", "<": "<", ">": ">", "le": "<=", "ge": ">=", "ne": "!=", "in": "in", "notin": "notin", "approx": "approx",
    "simeq": "approx", "sim": "sim", "to": "to", "equiv": "equiv", "cong": "cong", "subset": "subset", "not": "not",
    "subseteq": "subseteq", "propto": "propto", "perp": "perp", "parallel": "parallel", "Rightarrow": "=>",
    "mapsto": "mapsto",
}  # fmt: skip
_ARROWS = ("vec ", "overrightarrow ")
_UNIT_FRACTION = re.compile(r"\\frac\s*\{\s*\\(?:text|mathrm)")
_SET_SIGNS = {"cup": "cup", "cap": "cap", "setminus": "setminus", "backslash": "setminus"}
_CONNECTIVES = {",": ",", ";": ",", "and": "and", "or": "or"}


def parse(text: str, read_unit: ReadUnit | None = None, *, groups: bool = True) -> Node | None:
    """Parse a normalised text into a syntax tree. None: the text is not a formula.

    `read_unit` parses a unit at the end of the text. `groups`: `1,234` outside brackets is one number.
    """
    try:
        return _Parser(text, read_unit, groups=groups).parse_text()
    except (NotMathematicsError, RecursionError, ZeroDivisionError):
        return None


class _Parser(DigitGroups):
    """Parser of statements, relations, sums and products. Its base class parses operands."""

    def __init__(self, text: str, read_unit: ReadUnit | None, *, groups: bool) -> None:
        super().__init__(text, split_products(tokenize(text, groups=groups)))
        self._read_unit = read_unit
        self.is_congruence = False
        self._vectors = {token.text for token in self._tokens if token.is_bold}

    def parse_text(self) -> Node:
        """Parse the whole text: a formula or a list of formulas, optionally with a unit at the end."""
        node = self.items()
        if _has_words(node):
            raise NotMathematicsError("the text contains words outside a formula")
        unit = self._find_unit_here()
        if unit is not None:
            return Node("quantity", (node,), unit[0]) if unit[0] is not None else node
        if self.token.kind != "end":
            raise NotMathematicsError(f"the formula is complete before {self.token.text!r}, but more text follows")
        return node

    def items(self) -> Node:
        nodes = [self.relation()]
        signs: list[str] = []
        while (sign := self._read_connective()) is not None:
            signs.append(sign)
            nodes.append(self.relation())
        return self._parse_over_or_choose(connect_items(nodes, signs))

    def _parse_over_or_choose(self, node: Node) -> Node:
        r"""Parse TeX's \over or \choose after a formula, if one follows."""
        if self.token.kind != "command" or self.token.text not in ("over", "choose"):
            return node
        command = self.token.text
        self.advance()
        under = self.items()
        return Node("quotient", (node, under)) if command == "over" else Node("call", (node, under), "binomial")

    def _read_connective(self) -> str | None:
        """Skip adjacent connectives, such as `, and`, and return one for all. None: none follows."""
        if self.token.text in ("&", "\\&", "\\\\") and not self.brackets:
            self.advance()
            return "and"
        connective = _CONNECTIVES.get(self.token.text) if self.token.kind in ("sign", "word", "text") else None
        # ", and" is one connective.
        while self.token.kind in ("sign", "word", "text") and self.token.text in _CONNECTIVES:
            connective = connective if self.token.text in ",;" else _CONNECTIVES[self.token.text]
            self.advance()
        return connective

    def relation(self) -> Node:
        """Parse one item: words and a colon before a value, digit groups, or a chain like `1 < x < 2`."""
        if (label := self._parse_label()) is not None:
            return Node("relation", (label, self.relation()), ("=",))
        if (sign := self._read_relation_sign()) is not None:
            self.is_congruence = sign == "equiv"
            node = self._parse_side()
            self.is_congruence = False
            if (modulus := self._parse_modulus()) is not None:
                return make_congruence([node], [], modulus)
            # "= 5" is an answer with the left side omitted.
            return node if sign == "=" else Node("relation", (BLANK, node), (sign,))
        if (groups := self.digit_groups()) is not None:
            return groups
        parts = [self._parse_named_function() or self._parse_side()]
        signs: list[str] = []
        while (sign := self._read_relation_sign()) is not None:
            signs.append(sign)
            self.is_congruence = sign == "equiv"
            parts.append(self._parse_side())
        self.is_congruence = False
        if (modulus := self._parse_modulus()) is not None:
            return make_congruence(parts, signs, modulus)
        return Node("relation", tuple(parts), tuple(signs)) if signs else parts[0]

    def _parse_label(self) -> Node | None:
        """Parse words before a colon, as in `Area: 12`, or return None."""
        text = self.token.text
        if self.token.kind != "text" or len(text.rstrip(":")) < 3:
            return None
        if not text.endswith(":"):
            if self.following().text != ":":
                return None
            self.advance()
        self.advance()
        return Node("words", (), text.rstrip(": ").lower())

    def _parse_named_function(self) -> Node | None:
        """Parse a function before an equals sign, as in `N(t) = 2t`, or return None. Any letter may be its name."""
        name, opening, variable, closing, sign = (self._tokens[self._place :] + [self.token] * 4)[:5]
        texts = (opening.text, closing.text, sign.text)
        if name.kind != "letter" or variable.kind != "letter" or texts != ("(", ")", "=") or name.text == variable.text:
            return None
        for _ in range(4):
            self.advance()
        return Node("apply", (symbol(variable.text),), name.text)

    def _parse_side(self) -> Node:
        if self.token.kind == "number" and self.following().text == ":" and (clock := self.digit_groups()) is not None:
            return clock
        return self._parse_ratio(self.set_expression())

    def _parse_modulus(self) -> Node | None:
        r"""Parse a congruence's modulus (`\pmod 7`, `(mod 7)`, `mod 7`), or return None."""
        is_bracketed = self.token.text == "(" and self.following().text in MODULUS_COMMANDS
        if is_bracketed:
            self.advance()
        if self.token.kind != "command" or self.token.text not in MODULUS_COMMANDS:
            return None
        self.advance()
        modulus = self.term()
        if is_bracketed:
            self.expect(")")
        return modulus

    def _read_relation_sign(self) -> str | None:
        if self.token.kind not in ("sign", "command") or self.token.text not in _RELATIONS:
            return None
        sign = _RELATIONS[self.token.text]
        self.advance()
        return sign

    def _parse_ratio(self, first: Node) -> Node:
        """Parse the rest of a ratio, `: 3 : 4` or `to 3`, after its first term. Return only this term if none follows.

        `self.bars` is above 0 in a set's braces, where a colon begins the condition, and between bars.
        """
        terms = [first]
        while self.token.text == ":" and self.bars == 0:
            self.advance()
            terms.append(self.set_expression())
        if len(terms) == 1 and self.token.kind in ("word", "text") and self.token.text == "to":
            self.advance()
            return Node("ratio", (first, self.set_expression()), "to")
        return Node("ratio", tuple(terms)) if len(terms) > 1 else first

    def set_expression(self) -> Node:
        node = self.sum()
        while self.token.kind == "command" and self.token.text in _SET_SIGNS:
            sign = _SET_SIGNS[self.token.text]
            self.advance()
            node = Node("setop", (node, self.sum()), sign)
        return node

    def sum(self) -> Node:
        self.enter_nesting()
        terms = [self._parse_signed_term()]
        while self._is_sign():
            terms.append(self._parse_signed_term(is_after_term=True))
        self.leave_nesting()
        return join_operands("sum", terms)

    def _is_sign(self) -> bool:
        return self.token.text in ("+", "-") or (self.token.kind == "command" and self.token.text in ("pm", "mp"))

    def _parse_signed_term(self, *, is_after_term: bool = False) -> Node:
        """Parse a term with its sign, if any. After a term, the sign is an operator, so a second sign may follow."""
        if not self._is_sign():
            return self.term()
        sign = self.token.text
        self.advance()
        # 2 + -5 and 2 - -5.
        if is_after_term and self.token.text in ("+", "-"):
            return self._with_sign(sign, self._parse_signed_term())
        return self._with_sign(sign, self.term())

    def _with_sign(self, sign: str, node: Node) -> Node:
        if sign == "+":
            return node
        return negative(node) if sign == "-" else Node("sign", (node,), 1 if sign == "pm" else -1)

    def term(self) -> Node:
        """Parse a product, with or without signs between its factors."""
        node = self._factor_or_mixed()
        if node.kind == "words":
            return node
        while True:
            if self.token.text in ("*", "cdot", "times") and self.token.kind in ("sign", "command"):
                is_cross = self.token.text == "times"
                self.advance()
                factor = self._parse_signed_factor()
                node = self._multiply_by_times(node, factor) if is_cross else join_operands("product", [node, factor])
            elif self.token.text == "bmod" and self.token.kind == "command" and not self.is_congruence:
                self.advance()
                node = Node("call", (node, self._parse_signed_factor()), "mod")
            elif self.token.text in ("/", "div"):
                self.advance()
                node = Node("quotient", (node, self._parse_signed_factor()))
            # A letter after a number may begin its unit instead of another factor.
            elif self.starts_factor() and not self._has_unit_here():
                # Two numbers in a row are a typo or a list, except when the second begins a power: 2 3^2.
                is_after_factorial = self._tokens[self._place - 1].text == "!"
                if self.token.kind in ("number", "numeral") and not (
                    is_after_factorial or (self.token.has_space and self.following().text == "^")
                ):
                    raise NotMathematicsError("two numbers follow each other without an operator")
                is_braced = self.token.text == "{"
                factor = self.power()
                # Braces are not shown: {7}{1} looks like 71.
                if is_braced and factor.kind == "number":
                    raise NotMathematicsError("a number in braces follows an operand without an operator")
                node = join_operands("product", [node, factor])
            else:
                return node

    def _multiply_by_times(self, node: Node, factor: Node) -> Node:
        r"""Return the product of two operands of \times: vectors have a cross product, sets a set of pairs."""
        before, last = (node.parts[:-1], node.parts[-1]) if node.kind == "product" else ((), node)
        if _is_named_set(last) and _is_named_set(factor):
            return Node("setop", (node, factor), "times")
        is_cross = self.is_vector(last) and (self.is_vector(factor) or last == symbol("nabla"))
        return join_operands(
            "product",
            [*before, Node("cross", (last, factor)) if is_cross else join_operands("product", [last, factor])],
        )

    def is_vector(self, node: Node) -> bool:
        """Return whether a formula is a vector: a bold letter, one with an arrow, or a sum or multiple of vectors."""
        if node.kind == "symbol":
            return node.value in self._vectors or node.value == "nabla" or node.value.startswith(_ARROWS)
        return node.kind in ("sum", "product", "negative", "cross") and any(map(self.is_vector, node.parts))

    def _parse_signed_factor(self) -> Node:
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
            if part.kind == "quotient" and all(operand.kind == "number" for operand in part.parts):
                return self._make_mixed_number(first, part)
            return join_operands("product", [number(first.number or 0), part])
        if is_whole and second.kind == "number" and second.has_space and second.text.isdigit():
            self.advance()
            self.advance()
            slash = self.token.text
            self.advance()
            if slash != "/" or self.token.kind != "number" or not self.token.text.isdigit():
                raise NotMathematicsError("two numbers follow each other without an operator")
            part = Node("quotient", (number(second.number or 0), number(self.token.number or 0)))
            self.advance()
            return self._make_mixed_number(first, part)
        return self.power()

    def _make_mixed_number(self, whole_number: Token, part: Node) -> Node:
        numerator, denominator = (operand.value for operand in part.parts)
        # 3 5/2 is not a mixed number, and reading it as a product would guess.
        if not 0 <= numerator < denominator:
            raise NotMathematicsError("the fraction of a mixed number is not between 0 and 1")
        return number((whole_number.number or 0) + numerator / denominator)

    def _is_unit_at(self, token: Token) -> bool:
        return _UNIT_FRACTION.match(self.source, token.start) is not None

    def _has_unit_here(self) -> bool:
        return self._find_unit_here() is not None

    def _find_unit_here(self) -> tuple[Any] | None:
        """Return the rest of the text as a unit, in a tuple: `(None,)` for words without effect. None: no unit."""
        token = self.token
        if self._read_unit is None or self.brackets or token.kind == "end":
            return None
        # A LaTeX space or command separates like a space.
        is_spaced = token.has_space or self.source[token.start] == "\\"
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


def _is_named_set(node: Node) -> bool:
    return node.kind == "symbol" and node.value.startswith("mathbb")


def _has_words(node: Node) -> bool:
    """Return whether a formula contains words other than a name before an equals sign."""
    if node.kind == "relation" and node.parts[0].kind == "words":
        return any(_has_words(part) for part in node.parts[1:])
    return node.kind == "words" or any(_has_words(part) for part in node.parts)
