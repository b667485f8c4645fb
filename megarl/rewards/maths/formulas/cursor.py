"""Reading position in the tokens of a formula, with the depth of nesting."""

from __future__ import annotations

from megarl.rewards.maths.formulas.nodes import Node
from megarl.rewards.maths.formulas.tokens import Token
from megarl.rewards.maths.numbers import NotMathematicsError

MAX_DEPTH = 60
"""Maximum depth of nested brackets and powers. A level takes about ten of Python's thousand stack frames."""


class Cursor:
    """Base class of the formula parser: the reading position in the tokens."""

    def __init__(self, source: str, tokens: list[Token]) -> None:
        self.source = source
        self._tokens = tokens
        self._place = 0
        self.brackets = 0
        self.bars = 0
        self._depth = 0

    # The grammar, implemented by subclasses.
    def items(self) -> Node:
        raise NotImplementedError

    def relation(self) -> Node:
        raise NotImplementedError

    def sum(self) -> Node:
        raise NotImplementedError

    def term(self) -> Node:
        raise NotImplementedError

    def power(self) -> Node:
        raise NotImplementedError

    def atom(self) -> Node:
        raise NotImplementedError

    def group(self) -> Node:
        raise NotImplementedError

    def index(self) -> Node:
        raise NotImplementedError

    def exponent(self) -> Node:
        raise NotImplementedError

    def raise_to_power(self, base: Node) -> Node:
        raise NotImplementedError

    def starts_factor(self) -> bool:
        raise NotImplementedError

    @property
    def token(self) -> Token:
        return self._tokens[self._place]

    def following(self) -> Token:
        return self._tokens[min(self._place + 1, len(self._tokens) - 1)]

    def advance(self) -> None:
        self._place = min(self._place + 1, len(self._tokens) - 1)

    def enter_nesting(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotMathematicsError("the formula is nested too deeply")

    def leave_nesting(self) -> None:
        self._depth -= 1

    def expect(self, sign: str) -> None:
        if self.token.kind == "end" or self.token.text != sign:
            raise NotMathematicsError(f"{sign!r} is missing before {self.token.text!r}")
        self.advance()
