"""Parser of LaTeX commands with arguments: fractions, roots, functions, matrices."""

from __future__ import annotations

from fractions import Fraction

from megarl.rewards.maths.formulas.cursor import Cursor
from megarl.rewards.maths.formulas.nodes import OTHERWISE, Node, join_operands, number, replace_node, symbol
from megarl.rewards.maths.formulas.tokens import FUNCTION_WORDS, Token
from megarl.rewards.maths.numbers import NotMathematicsError

FUNCTIONS = FUNCTION_WORDS - {"sqrt", "mod"}
MODULUS_COMMANDS = frozenset(("mod", "pmod", "bmod"))
SERIES = {"sum": "sum", "prod": "product"}
_SEVERAL_ARGUMENTS = ("max", "min", "gcd", "lcm")
_DIFFERENTIALS = (symbol("d"), symbol("partial"), symbol("Delta"))
_MATRICES = ("pmatrix", "matrix", "vmatrix", "Vmatrix", "array", "cases", "Bmatrix")


class Commands(Cursor):
    """Part of the formula parser: LaTeX commands and their arguments."""

    def until(self, *closing: str) -> Node:
        """Parse the items up to one of the signs `closing`."""
        self.brackets += 1
        # Bars outside the brackets cannot close inside them.
        bars, self.bars = self.bars, 0
        node = self.items()
        self.bars = bars
        self.brackets -= 1
        if self.token.kind == "end" or self.token.text not in closing:
            raise NotMathematicsError(f"expected one of {closing} before {self.token.text!r}")
        self.advance()
        return node

    def argument(self) -> Node:
        r"""Parse a LaTeX command's next argument: a group in braces, or a token. In `\frac12`, 1 and 2 are tokens."""
        token = self.token
        if token.text == "{" and token.kind == "sign":
            return self.group()
        if token.kind == "number" and token.text.isdigit() and len(token.text) > 1:
            # Take the first digit only, and leave the rest of the number as the next token.
            digits = token.text[1:]
            self._tokens[self._place] = Token("number", digits, token.start + 1, False, Fraction(int(digits)))
            return number(int(token.text[0]))
        if token.kind == "sign" and token.text != "|":
            raise NotMathematicsError("a LaTeX command has no argument")
        self.enter_nesting()
        node = self.atom()
        self.leave_nesting()
        return node

    def root(self) -> Node:
        r"""Parse the operand of \sqrt, after its degree in square brackets, if any."""
        degree = number(2)
        if self.token.text == "[":
            self.advance()
            degree = self.until("]")
        if self.token.text == "(":
            self.advance()
            return Node("call", (self.until(")"), degree), "root")
        return Node("call", (self.argument(), degree), "root")

    def read_name_argument(self) -> str:
        """Return a command's next argument as plain text, to use as a name."""
        if self.token.text != "{":
            token = self.token
            if token.kind not in ("letter", "word", "number"):
                raise NotMathematicsError("a command needs a name as its argument, but none follows")
            self.advance()
            name = token.text
            # The tokenizer split a word into letters. `origin` marks its first one, so join them again.
            while token.origin and self.token.kind == "letter" and not self.token.has_space and not self.token.origin:
                name += self.token.text
                self.advance()
            return name
        self.advance()
        depth, name = 1, ""
        while depth:
            if self.token.kind == "end":
                raise NotMathematicsError("the argument of a command has no closing brace")
            depth += (self.token.text == "{") - (self.token.text == "}")
            name += self.token.text if depth else ""
            self.advance()
        return name

    def function(self, name: str) -> Node:
        r"""Parse a call of the function `name`, with its powers, index and argument: `\sin^2 x`, `\log_2 8`."""
        # In "min = 3" the word is the name of a value.
        if self.token.text == "=":
            return Node("words", (), name)
        base = exponent = None
        while self.token.text in ("_", "^") and self.token.kind == "sign":
            is_base = self.token.text == "_"
            self.advance()
            script = self.argument() if is_base else self.exponent()
            base, exponent = (script, exponent) if is_base else (base, script)
        node = self._make_call(name, self._function_argument(), base)
        if exponent is None:
            return node
        # sin^{-1} is the arcsine, not 1/sin. Other exponents are powers: sin^2 x.
        if exponent == number(-1) and name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh"):
            return Node("call", node.parts, "arc" + name)
        return Node("power", (node, exponent))

    def _make_call(self, name: str, argument: Node, base: Node | None) -> Node:
        """Return the call of the function `name`. `base`: the index of a logarithm."""
        parts = argument.parts if argument.kind in ("list", "tuple", "set") else (argument,)
        if name == "exp":
            return Node("power", (Node("constant", (), "e"), argument))
        if name in ("log", "ln", "lg"):
            if base is None:
                # log without a base is unclear (10 or e), so it stays symbolic and equals only another log.
                base = {"ln": Node("constant", (), "e"), "lg": number(10), "log": symbol("log")}[name]
            return Node("call", (argument, base), "log")
        if base is not None:
            raise NotMathematicsError(f"the function {name} has an index; only a logarithm may have one, its base")
        if name in _SEVERAL_ARGUMENTS:
            return Node("call", tuple(parts), name)
        return Node("call", (argument,), name)

    def _function_argument(self) -> Node:
        """Parse a function's argument: brackets, or the factors up to the next sign, function or bracket.

        So `sin 2x cos x` is a product of two functions.
        """
        if self.token.text == "(" and self.token.kind == "sign":
            self.advance()
            return self.until(")")
        if self.token.text == "\\{":
            # Braces are brackets here, except around the numbers of a maximum.
            braces = self.power()
            return braces.parts[0] if braces.kind == "set" and len(braces.parts) == 1 else braces
        # `sin -x + 1` may be read in two ways.
        if self.token.text in ("-", "+"):
            raise NotMathematicsError("a function is followed by + or -, so its argument is not clear")
        parts = [self.power()]
        while self.starts_factor() and self.token.text not in ("(", "[") and self.token.text not in FUNCTIONS:
            if self.token.kind == "number":
                raise NotMathematicsError("two numbers follow each other without an operator")
            parts.append(self.power())
        return join_operands("product", parts)

    def series(self, name: str) -> Node:
        r"""Parse a sum or a product over an index: `\sum_{k=1}^{10} k`."""
        scripts: dict[str, Node] = {}
        while self.token.text in ("_", "^") and self.token.kind == "sign":
            sign = self.token.text
            self.advance()
            scripts[sign] = self.index() if sign == "_" else self.exponent()
        index_equation, high = scripts.get("_"), scripts.get("^")
        if (
            index_equation is None
            or high is None
            or index_equation.kind != "relation"
            or index_equation.value != ("=",)
        ):
            raise NotMathematicsError(f"the {name} is written without the limits of its index")
        index, low = index_equation.parts
        # An index called i or e is not the constant.
        if index.kind != "symbol" and index not in (Node("constant", (), "i"), Node("constant", (), "e")):
            raise NotMathematicsError(f"the index of a {name} is not a letter")
        body = self.term()
        # Indices are numbered, so that their letters do not matter.
        depth = sum(node.kind == "series" for node in body.walk())
        bound = symbol(f"index {depth}")
        return Node("series", (replace_node(body, index, bound), low, high), (SERIES[name], bound.value))

    def matrix(self) -> Node:
        r"""Parse a matrix after `\begin`, up to its `\end`. `cases` with one column are statements that all hold."""
        name = self.read_name_argument()
        if name not in _MATRICES:
            raise NotMathematicsError(f"the LaTeX environment {name} is not supported")
        # The columns of an array, {cc}, do not matter.
        if name == "array":
            self.read_name_argument()
            name = "matrix"
        self.brackets += 1
        rows: list[Node] = []
        cells: list[Node] = []
        while True:
            cells.append(self._parse_cell())
            if self.token.text == "&":
                self.advance()
                continue
            rows.append(Node("row", tuple(cells)))
            cells = []
            if self.token.text == "\\\\":
                self.advance()
            if self.token.text == "end":
                break
            if not rows or self._tokens[self._place - 1].text != "\\\\":
                raise NotMathematicsError(r"a matrix has \begin without \end")
        self.brackets -= 1
        self.advance()
        self.read_name_argument()
        if name == "cases" and all(len(row.parts) == 1 for row in rows):
            statements = tuple(row.parts[0] for row in rows)
            return statements[0] if len(statements) == 1 else Node("list", statements, "and")
        kind = {"pmatrix": "matrix", "Bmatrix": "matrix"}.get(name, name)
        return Node("matrix", tuple(rows), kind)

    def _parse_cell(self) -> Node:
        if self.token.kind == "text" and self.token.text == OTHERWISE.value:
            self.advance()
            return OTHERWISE
        return self.items()


def fraction(over: Node, under: Node) -> Node:
    """Return a fraction's node. In a derivative like `dy/dx`, the d must not be cancelled."""
    sign = _leading_factor(under)
    is_derivative = sign in _DIFFERENTIALS and under.kind == "product" and _leading_factor(over) == sign
    return Node("apply", (over, under), "derivative") if is_derivative else Node("quotient", (over, under))


def _leading_factor(node: Node) -> Node:
    first = node.parts[0] if node.kind == "product" else node
    return first.parts[0] if first.kind == "power" else first
