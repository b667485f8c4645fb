"""Parser of a formula's operands: numbers, symbols, powers, functions, brackets, sets, matrices."""

from __future__ import annotations

from fractions import Fraction

from megarl.rewards.maths.formulas.commands import FUNCTIONS, MODULUS_COMMANDS, SERIES, fraction
from megarl.rewards.maths.formulas.nodes import (
    DEGREE,
    EMPTY_SET,
    INFINITY,
    Node,
    join_operands,
    negative,
    number,
    symbol,
)
from megarl.rewards.maths.formulas.scripts import Scripts
from megarl.rewards.maths.numbers import NotMathematicsError

GREEK = frozenset(
    """
    alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega
    Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar aleph nabla partial
    """.split()  # noqa: SIM905
)
DECORATIONS = frozenset(
    """
    overline bar vec hat widehat tilde widetilde dot ddot underline overrightarrow overleftarrow overleftrightarrow
    mathcal mathscr mathfrak overarc stackrel cancel boxed
    """.split()  # noqa: SIM905
)
_FONTS = frozenset(("mathbf", "mathrm", "mathit", "mathsf", "boldsymbol", "bm", "text"))
_SAME_DECORATIONS = {"overline": "bar", "widehat": "hat", "widetilde": "tilde"}
_SHAPES = {"angle": "angle", "triangle": "triangle", "odot": "circle", "square": "square"}
# A half-open interval such as (0, 1] closes with the other bracket.
_CLOSING = {"(": (")", "]"), "[": ("]", ")")}
# A letter before brackets: `f(a + b)` is always a call; `h(x)` is one only with a single letter or number inside.
_ALWAYS_FUNCTIONS = frozenset(("f", "g", "F", "G", "Gamma", "zeta", "mathbbE", "mathbbP"))
_PERHAPS_FUNCTIONS = frozenset("hpqsuvyPQRSTHV")
_VECTORS = frozenset("abuvwxyz")
_TRANSPOSES = (symbol("T"), symbol("top"))
_NUMERIC_FUNCTIONS = {"Gamma": "gamma", "zeta": "zeta"}


class Atoms(Scripts):
    """Part of the formula parser: the factors of a product."""

    def starts_factor(self) -> bool:
        """Return whether the next token begins another factor of a product without a sign (`2x`)."""
        token = self.token
        if token.kind in ("number", "numeral", "letter"):
            return True
        if token.kind == "word":
            return token.text.isupper()
        if token.kind == "sign":
            # (mod 7) ends a congruence.
            if token.text == "(" and self.following().text in MODULUS_COMMANDS:
                return False
            # Within bars, the next | closes them. Outside it begins an absolute value.
            return token.text in ("(", "[", "{") or (token.text == "|" and self.bars == 0)
        return token.kind == "command" and self._is_atom(token.text)

    def _is_atom(self, name: str) -> bool:
        return (
            name in GREEK or name in DECORATIONS or name in FUNCTIONS or name in _FONTS or name in _SHAPES
            or name.startswith("mathbb")
            or name in ("pi", "infty", "frac", "sqrt", "binom", "begin", "lfloor", "lceil", "emptyset", "ldots")
            or name in ("imath", "langle", "neg") or name in SERIES
        )  # fmt: skip

    def power(self) -> Node:
        """Parse a factor, including its index, powers, factorials and percent sign."""
        self.enter_nesting()
        is_word = self.token.kind == "word"
        node = self.atom()
        while True:
            text = self.token.text
            if self.token.kind != "sign":
                break
            if text == "^":
                self.advance()
                node = self._raise_word(node) if is_word else self.raise_to_power(node)
                is_word = False
            elif text == "_":
                self.advance()
                node = self._add_index(node)
            elif text == "!":
                self.advance()
                is_double = self.token.text == "!"
                if is_double:
                    self.advance()
                node = Node("call", (node,), "double_factorial" if is_double else "factorial")
            # Outside brackets % is a unit at the end of the text, read by the parser.
            elif text in ("%", "\\%") and self.brackets:
                self.advance()
                node = Node("quotient", (node, number(100)))
            elif text == "'" or text == '"':
                self.advance()
                node = self._add_primes(node, len(text))
            else:
                break
        self.leave_nesting()
        return node

    def _raise_word(self, word: Node) -> Node:
        """Parse the exponent of a word like AB. Powers and degrees apply to the word, all else to the last letter."""
        last = symbol(word.value[-1])
        node = self.raise_to_power(last)
        if node == join_operands("product", [last, DEGREE]):
            return join_operands("product", [word, DEGREE])
        is_inverse = node.kind == "power" and node.parts[1].kind == "number" and node.parts[1].value < 0
        if node.kind == "power" and not is_inverse:
            return Node("power", (word, *node.parts[1:]))
        return join_operands("product", [symbol(word.value[:-1]), node])

    def raise_to_power(self, base: Node) -> Node:
        r"""Parse the exponent of `base`. Not all are powers: `90^\circ`, `f^{-1}(x)`, `A^T`."""
        exponent = self.exponent()
        if exponent.kind == "constant" and exponent.value == "degree":
            # 90^\circ is not a power but 90 degrees.
            return join_operands("product", [base, DEGREE])
        if exponent.kind == "symbol" and exponent.value.startswith("prime"):
            return self._add_primes(base, exponent.value.count("'"))
        # f^{-1}(x) is the inverse function, not a reciprocal.
        is_inverse = base.kind == "symbol" and base.value in _ALWAYS_FUNCTIONS and exponent == number(-1)
        if is_inverse and self.token.text == "(":
            return self._apply_to_arguments(symbol(base.value + "^-1'"))
        if exponent in _TRANSPOSES and _may_be_matrix(base):
            return _transpose(base)
        # A^{-T} is the transpose of the inverse. Vectors, in small letters, have none.
        if exponent in map(negative, _TRANSPOSES) and _has_capital(base) and _may_be_matrix(base):
            return _transpose(Node("power", (base, number(-1))))
        return Node("power", (base, exponent))

    def _add_primes(self, base: Node, count: int) -> Node:
        if base.kind not in ("symbol", "apply", "index"):
            raise NotMathematicsError("a prime follows something other than a symbol")
        return self._apply_to_arguments(Node(base.kind, base.parts, base.value + "'" * count))

    def _add_index(self, base: Node) -> Node:
        """Parse the index of `base`, and its arguments if it is a function."""
        # x^2_1 is (x_1)^2: LaTeX allows both orders.
        if base.kind == "power" and base.parts[0].kind == "symbol":
            return Node("power", (self._add_index(base.parts[0]), base.parts[1]))
        if base.kind != "symbol" and not (base.kind == "constant" and base.value in ("e", "i")):
            raise NotMathematicsError("a subscript follows something other than a symbol")
        index = self.index()
        return self._apply_to_arguments(Node("index", (index,), base.value))

    def atom(self) -> Node:
        """Parse one operand: a number, symbol, text, bracket or command."""
        token = self.token
        if token.kind == "number":
            self.advance()
            return number(token.number if token.number is not None else Fraction(0))
        if token.kind == "numeral":
            self.advance()
            return Node("numeral", (number(token.number or 0),), token.text.partition("_")[0].lstrip("0") or "0")
        if token.kind == "letter":
            self.advance()
            # e and i are constants in answers, hardly ever variables.
            if token.text in ("e", "i"):
                return Node("constant", (), token.text)
            return self._apply_to_arguments(symbol(token.text))
        if token.kind == "word" and token.text.isupper():
            self.advance()
            return symbol(token.text)
        if token.kind == "text":
            return self._parse_words()
        if token.kind == "sign":
            return self._parse_brackets()
        if token.kind == "command":
            return self._parse_command()
        raise NotMathematicsError(f"{token.text!r} is not an operand")

    def _parse_words(self) -> Node:
        text = self.token.text
        if not all(character.isalpha() or character in " -'" for character in text):
            raise NotMathematicsError(
                f"the text {text!r} has characters other than letters, spaces, hyphens and apostrophes"
            )
        self.advance()
        return symbol(text) if len(text) == 1 or text.isupper() else Node("words", (), text.lower())

    def _apply_to_arguments(self, function: Node) -> Node:
        """Return the call f(x) if the brackets after a symbol hold arguments, else the symbol."""
        if self.token.text not in ("(", "[") or self.token.kind != "sign":
            return function
        name = function.value.rstrip("'")
        is_capital = len(name) == 1 and name.isupper()
        if self.token.text == "[":
            # E[X] is an expectation. Other letters are multiplied by square brackets: P[(1+r)^n-1].
            is_function = (name == "E" and not self.token.has_space) or name in ("mathbbE", "mathbbP")
            return self._parse_call(function, "]") if is_function and function.kind == "symbol" else function
        is_function = name in _ALWAYS_FUNCTIONS or name != function.value
        if function.kind == "index" or not is_function:
            argument, closing = self.following(), self._tokens[min(self._place + 2, len(self._tokens) - 1)]
            # h(x) is a function, but h(a + b) is rather a product.
            is_simple = argument.kind == "letter" or (argument.kind == "number" and argument.text.isdigit())
            is_simple = is_simple and closing.text == ")"
            is_usual_function = name in _PERHAPS_FUNCTIONS or (function.kind == "index" and name in "fghFG")
            is_function = is_function or (is_usual_function and is_simple)
            if function.kind == "symbol" and not is_function:
                # P(1/2), \phi(12): a letter is not multiplied from the left by a number in brackets.
                may_have_number = is_usual_function or is_capital or name in GREEK
                is_function = may_have_number and self._has_number_in_brackets()
                is_function = is_function or (name == "E" and argument.kind == "letter" and argument.text.isupper())
        if not is_function or function.kind == "apply":
            return function
        return self._parse_call(function, ")")

    def _has_number_in_brackets(self) -> bool:
        """Return whether the brackets here hold one number without variables, and no power follows: not P(1.05)^3."""
        is_first = True
        for place in range(self._place + 1, len(self._tokens) - 1):
            token = self._tokens[place]
            if token.text == ")" and token.kind == "sign":
                return not is_first and self._tokens[place + 1].text != "^"
            is_constant = token.kind == "number" or token.text in ("e", "pi", "frac", "sqrt", "infty")
            is_sign = token.kind == "sign" and (token.text in "{}/^" or (is_first and token.text == "-"))
            if not is_constant and not is_sign:
                return False
            is_first = False
        return False

    def _parse_call(self, function: Node, closing: str) -> Node:
        """Parse the arguments in brackets up to `closing`. Return the call."""
        self.advance()
        arguments = self.until(closing)
        parts = arguments.parts if arguments.kind == "list" else (arguments,)
        # The zeta function takes too long for many values of a variable, so it is an unknown function there.
        is_numeric = function.kind == "symbol" and function.value in _NUMERIC_FUNCTIONS and len(parts) == 1
        if is_numeric and (function.value != "zeta" or not arguments.symbols()):
            return Node("call", parts, _NUMERIC_FUNCTIONS[function.value])
        return Node("apply", (*parts, *function.parts), function.value)

    def _parse_brackets(self) -> Node:
        opening = self.token.text
        if opening in ("(", "["):
            return self._parse_pair_or_group(opening)
        if opening == "{":
            return self.group()
        if opening == "\\{":
            return self._parse_set()
        if opening != "|":
            raise NotMathematicsError(f"{opening!r} does not begin an operand")
        self.advance()
        # Between bars, | closes them; `bars` counts the open pairs.
        self.bars += 1
        self.brackets += 1
        node = self.sum()
        self.brackets -= 1
        self.bars -= 1
        self.expect("|")
        return Node("call", (node,), "abs")

    def _parse_pair_or_group(self, opening: str) -> Node:
        """Parse round or square brackets: a tuple, an interval, or a formula in them."""
        self.advance()
        node = self.until(*_CLOSING[opening])
        closing = self._tokens[self._place - 1].text
        if node.kind == "list" and node.value == ",":
            return Node("tuple", node.parts, opening + closing)
        if node.kind == "list" and opening + closing == "()":
            return node
        # Only intervals and tuples may mix brackets.
        if closing != _CLOSING[opening][0] or node.kind == "list":
            raise NotMathematicsError("the opening and the closing bracket do not match")
        return node

    def group(self) -> Node:
        self.expect("{")
        self.brackets += 1
        # A group in braces starts anew: bars outside it cannot close inside.
        bars, self.bars = self.bars, 0
        node = self.items()
        self.bars = bars
        self.brackets -= 1
        self.expect("}")
        return node

    def _parse_set(self) -> Node:
        """Parse a set in braces: its elements, or a variable and its condition."""
        self.advance()
        if self.token.text == "\\}":
            self.advance()
            return EMPTY_SET
        self.brackets += 1
        # In a set, | and : separate the condition, so they must not begin an absolute value.
        bars, self.bars = self.bars, self.bars + 1
        node = self.items()
        if self.token.text in ("|", "mid", ":"):
            self.advance()
            node = Node("builder", (node, self.items()))
        self.bars = bars
        self.brackets -= 1
        self.expect("\\}")
        if node.kind == "builder":
            return node
        # Items joined by "or" are one element's alternatives, not elements.
        return Node("set", node.parts if node.kind == "list" and node.value != "or" else (node,))

    def _parse_command(self) -> Node:
        """Parse an operand that begins with a LaTeX command."""
        name = self.token.text
        self.advance()
        if name in FUNCTIONS:
            return self.function(name)
        if name in GREEK:
            return self._apply_to_arguments(symbol(name))
        if name in DECORATIONS:
            return symbol(f"{_SAME_DECORATIONS.get(name, name)} {self.read_name_argument()}")
        if name in _SHAPES:
            return symbol(f"{_SHAPES[name]} {self.read_name_argument()}")
        if name in _FONTS:
            return self.argument()
        if name.startswith("mathbb"):
            return self._apply_to_arguments(symbol(name))
        simple = {"pi": Node("constant", (), "pi"), "infty": INFINITY, "emptyset": EMPTY_SET, "ldots": symbol("ldots"),
                  "imath": Node("constant", (), "i"), "top": symbol("top"), "intercal": symbol("top")}  # fmt: skip
        if name in simple:
            return simple[name]
        if name in ("frac", "binom"):
            over, under = self.argument(), self.argument()
            return fraction(over, under) if name == "frac" else Node("call", (over, under), "binomial")
        if name in SERIES:
            return self.series(name)
        if name == "neg":
            return Node("apply", (self.power(),), "not")
        if name == "sqrt":
            return self.root()
        if name in ("lfloor", "lceil"):
            node = self.until({"lfloor": "rfloor", "lceil": "rceil"}[name])
            return Node("call", (node,), {"lfloor": "floor", "lceil": "ceiling"}[name])
        if name == "langle":
            return Node("tuple", self.until("rangle").parts, "()")
        if name == "begin":
            return self.matrix()
        raise NotMathematicsError(f"the command {name} is not supported")


def _has_capital(node: Node) -> bool:
    return any(name[:1].isupper() for name in node.symbols())


def _may_be_matrix(base: Node) -> bool:
    """Return whether a T as exponent means a transpose: A^T, (AB)^T, x^T, but not 2^T, (1+R)^T."""
    if base.kind in ("matrix", "transpose", "tuple"):
        return True
    if base.kind == "power":
        return base.parts[1] == number(-1) and _has_capital(base) and _may_be_matrix(base.parts[0])
    is_vector = base.kind == "symbol" and base.value in _VECTORS
    terms = base.parts if base.kind == "sum" else (base,)
    return is_vector or (base.kind in ("symbol", "product", "sum") and all(map(_has_capital, terms)))


def _transpose(base: Node) -> Node:
    """Return the transpose of a formula. Rows and columns of numbers are exchanged at once."""
    if base.kind == "tuple" and base.value in ("()", "[]"):
        return Node("matrix", tuple(Node("row", (part,)) for part in base.parts), "matrix")
    is_matrix = base.kind == "matrix" and base.value == "matrix" and len({len(row.parts) for row in base.parts}) == 1
    if not is_matrix:
        return Node("transpose", (base,))
    columns = zip(*(row.parts for row in base.parts), strict=True)
    return Node("matrix", tuple(Node("row", cells) for cells in columns), "matrix")
