"""Numeric value of a formula for chosen values of its variables."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

from mpmath.libmp import libmpf

from megarl.rewards.maths.equality.exact import NoValueError, series_terms
from megarl.rewards.maths.equality.numeric_functions import call_function, raise_to_power
from megarl.rewards.maths.equality.precision import CONTEXT, as_fraction
from megarl.rewards.maths.formulas.nodes import INFINITY, Node

_I = CONTEXT.mpc(0, 1)
_TERMS_OF_INFINITE_SERIES = 12


class Evaluation:
    """Numeric evaluation of formulas, for one choice of values of their variables.

    `scale` is the largest summand so far: a difference small against it counts as a rounding error. `bits` is the
    largest difference of two summands' binary exponents. Variables in `whole_names` are whole numbers.
    """

    def __init__(self, kind: str, seed: int, whole_names: frozenset[str] = frozenset()) -> None:
        self._kind = kind
        self._seed = seed
        self._whole_names = whole_names
        self.scale = CONTEXT.mpf(0)
        self.bits = 0

    def value(self, node: Node) -> Any:
        """Return a formula's numeric value. Raises NoValueError if it has none."""
        try:
            # mpmath raises all of these outside a function's domain, or for too large numbers.
            number = self._evaluate(node)
        except (
            ZeroDivisionError,
            ValueError,
            OverflowError,
            TypeError,
            NotImplementedError,
            MemoryError,
            libmpf.ComplexResult,
        ):
            raise NoValueError from None
        if not CONTEXT.isfinite(number):
            raise NoValueError
        return number

    def _evaluate(self, node: Node) -> Any:
        kind = node.kind
        if kind == "number":
            self.bits = max(self.bits, node.value.denominator.bit_length())
            return CONTEXT.mpf(node.value.numerator) / node.value.denominator
        if kind in ("symbol", "constant"):
            return self._evaluate_symbol(node)
        if kind == "series":
            return self._evaluate_series(node)
        parts = [self._evaluate(part) for part in node.parts]
        if kind == "sum":
            return self._add(parts)
        if kind == "product":
            product = parts[0]
            for part in parts[1:]:
                product = product * part
            return product
        if kind == "quotient":
            return parts[0] / parts[1]
        if kind == "negative":
            return -parts[0]
        if kind == "power":
            return raise_to_power(*parts)
        if kind == "call":
            return call_function(node.value, parts)
        if kind == "numeral":
            return parts[0]
        # A cross product changes its sign with the order of its operands.
        if kind == "cross":
            return self._call_unknown_function("cross", parts) - self._call_unknown_function("cross", parts[::-1])
        if kind in ("apply", "index"):
            return self._call_unknown_function(f"{kind} {node.value} {len(parts)}", parts)
        raise NoValueError

    def _add(self, parts: list[Any]) -> Any:
        sizes = [abs(part) for part in parts if part != 0]
        if sizes:
            largest = max(sizes)
            self.scale = max(self.scale, largest)
            self.bits = max(self.bits, CONTEXT.mag(largest) - CONTEXT.mag(min(sizes)))
        return sum(parts[1:], parts[0])

    def _evaluate_series(self, node: Node) -> Any:
        low = as_fraction(self._evaluate(node.parts[1]))
        if node.parts[2] == INFINITY:
            high = low + _TERMS_OF_INFINITE_SERIES - 1
            # The first terms stand for the whole series, so it equals only another infinite series.
            remainder = _draw_value("infinite series", "positive", 0)
        else:
            high = as_fraction(self._evaluate(node.parts[2]))
            remainder = None
        terms = [self._evaluate(term) for term in series_terms(node, low, high)]
        if node.value[0] == "sum":
            return self._add([CONTEXT.mpf(0), *terms] if remainder is None else [remainder, *terms])
        product = CONTEXT.mpf(1) if remainder is None else remainder
        for term in terms:
            product = product * term
        return product

    def _evaluate_symbol(self, node: Node) -> Any:
        """Return a constant's number, or a variable's value in this evaluation."""
        if node.kind == "constant":
            # mpmath computes its constants when an operator is applied: `+` rounds to the context's precision.
            if node.value == "pi":
                return +CONTEXT.pi
            if node.value == "e":
                return +CONTEXT.e
            if node.value == "i":
                return _I
            if node.value == "degree":
                return CONTEXT.pi / 180
            raise NoValueError
        return _draw_value(node.value, self._kind, self._seed, is_whole=node.value in self._whole_names)

    def _call_unknown_function(self, name: str, parts: list[Any]) -> Any:
        """Return the value of an unknown function f(x): a smooth function of all arguments, different for every name.

        So formulas with the same unknown function can be compared.
        """
        value = _draw_value(name, "positive", 0)
        for argument_index, part in enumerate(parts):
            # Sines of large arguments lose digits.
            if CONTEXT.mag(part) > 20:
                raise NoValueError
            shift = _draw_value(f"{name} {argument_index}", "positive", 0)
            value = value + CONTEXT.sin(part * shift + value) + part * shift
        return value


@lru_cache(maxsize=4096)
def _draw_value(name: str, kind: str, seed: int, *, is_whole: bool = False) -> Any:
    """Draw a symbol's value. `kind`: half N (N/2 or (N+1)/2), mixed or mixed N (any sign), large, or small positive."""
    # Seeded by name: a symbol has the same value in both formulas and in every process.
    generator = random.Random(f"{name} {kind} {seed}")
    if kind.startswith("half"):
        num_halves = int(kind.removeprefix("half "))
        shift = generator.randrange(2)
        return CONTEXT.mpf(num_halves + shift) if is_whole else CONTEXT.mpf(num_halves + shift) / 2
    if is_whole:
        return CONTEXT.mpf(generator.randint(1, 12))
    if kind.startswith("mixed "):
        # The sizes are spread, and each sign is as likely as the other, so that few points meet all cases.
        return (
            generator.choice((-1, 1))
            * CONTEXT.mpf(generator.getrandbits(100))
            / (1 << 100)
            * 4 ** generator.uniform(0, 3)
        )
    size = generator.uniform(0.3, 3.0) if kind != "large" else generator.uniform(3.0, 30.0)
    # Negative values find differences such as x and |x|; positive ones keep roots and logarithms real.
    sign = -1 if kind == "mixed" and generator.random() < 0.7 else 1
    # A float has 53 bits. The tiny summand gives the value more digits, so that no formula meets a round number.
    return sign * CONTEXT.mpf(size) + CONTEXT.mpf(generator.getrandbits(100)) / (1 << 140)
