"""Parser of exponents and indices, the operands of ^ and _."""

from __future__ import annotations

from megarl.rewards.maths.formulas.commands import Commands
from megarl.rewards.maths.formulas.nodes import DEGREE, Node, number, symbol
from megarl.rewards.maths.formulas.tokens import Token
from megarl.rewards.maths.numbers import NotMathematicsError


class Scripts(Commands):
    """Part of the formula parser: exponents and indices."""

    def index(self) -> Node:
        """Parse the operand after _. A power after it belongs to the indexed symbol: x_1^2 is (x_1)^2."""
        return self._script(takes_power=False)

    def exponent(self) -> Node:
        """Parse the operand after ^. A power after it belongs to this operand: 2^3^2 is 2^(3^2)."""
        return self._script(takes_power=True)

    def _script(self, *, takes_power: bool) -> Node:
        """Parse a group in braces, or one token. Digits without braces are one number."""
        token = self.token
        if token.text == "{" and token.kind == "sign":
            next_token = self.following()
            if next_token.text == "circ" or (next_token.text == "^" and self._tokens[self._place + 2].text == "circ"):
                self._skip_to_brace()
                return DEGREE
            if next_token.text == "'":
                return symbol("prime" + "'" * self._skip_to_brace())
            if next_token.kind == "text":
                self._skip_to_brace()
                return symbol(next_token.text)
            return self.group()
        if token.text == "circ":
            self.advance()
            return DEGREE
        if token.text == "'":
            self.advance()
            return symbol("prime'")
        # x^+ has a sign as index, but x^-1 is a negative exponent.
        if token.text in ("+", "-"):
            self.advance()
            if self.token.kind == "number":
                node = self.atom()
                return number(-node.value) if token.text == "-" else node
            return symbol(token.text)
        if token.text in ("*", "\\*"):
            self.advance()
            return symbol("star")
        if token.kind == "text":
            self.advance()
            return symbol(token.text)
        if takes_power and token.kind == "word" and token.text[0] == "T":
            # A^TB is A^{T}B.
            next_letters = token.text[1:]
            self._tokens[self._place] = Token(
                "word" if len(next_letters) > 1 else "letter", next_letters, token.start + 1
            )
            return symbol("T")
        node = self.atom()
        if takes_power and self.token.text == "^" and self.token.kind == "sign":
            self.advance()
            self.enter_nesting()
            node = self.raise_to_power(node)
            self.leave_nesting()
        return node

    def _skip_to_brace(self) -> int:
        """Skip a group in braces without inner groups. Returns the number of skipped tokens."""
        self.advance()
        num_tokens = 0
        while self.token.text != "}":
            if self.token.kind == "end" or self.token.text == "{":
                raise NotMathematicsError("a group after ^ or _ contains another group, or has no closing brace")
            num_tokens += 1
            self.advance()
        self.advance()
        return num_tokens
