r"""Equality of formulas of matrices, like `A^TB` or `P^{-1}AP`. Their factors do not commute.

Letters get random square matrices of whole numbers modulo a prime, so two formulas are equal if their values are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache

from megarl.rewards.maths.equality.exact import NoValueError
from megarl.rewards.maths.formulas.nodes import Node, symbol

Matrix = tuple[tuple[int, ...], ...]

_PRIME = (1 << 61) - 1
_SIZE = 3
_MAX_EXPONENT = 64
_SCALARS = frozenset("ckmnrst")
"""Small letters that are hardly ever vectors."""
_DIMENSIONS = frozenset("MLTIKNJ")
"""Letters of physical dimensions, which commute: velocity is LT^{-1}."""
_IDENTITY = symbol("I")
_UNIT_MATRIX: Matrix = tuple(tuple(int(row == column) for column in range(_SIZE)) for row in range(_SIZE))


def are_matrices(gold: Node, prediction: Node) -> bool:
    """Return whether the letters of two formulas are matrices: a transpose occurs, or an inverse among capitals."""
    nodes = [*gold.walk(), *prediction.walk()]
    if any(node.kind == "transpose" for node in nodes):
        return True
    if not any(map(_is_inverse, nodes)):
        return False
    # Matrices are not divided by, so the letters of a gold fraction are numbers.
    if any(node.kind == "quotient" and node.parts[1].symbols() for node in gold.walk()):
        return False
    letters = {letter for node in nodes if node.kind == "symbol" for letter in _letters_of(node.value)}
    capitals = {letter for letter in letters if letter.isupper()}
    return len(capitals) > 1 and not capitals <= _DIMENSIONS and letters == capitals


def same_matrices(gold: Node, prediction: Node) -> bool:
    has_identity = any(map(_adds_identity, (*gold.walk(), *prediction.walk())))
    evaluations = _Evaluation(has_identity), _Evaluation(has_identity)
    try:
        values = [evaluation.value(node) for evaluation, node in zip(evaluations, (gold, prediction), strict=True)]
        return values[0] == values[1] and evaluations[0].gram_matrices == evaluations[1].gram_matrices
    except (NoValueError, ZeroDivisionError):
        return False


def _letters_of(name: str) -> str:
    """Return the letters of a product written as a word, `AB`, or nothing for other names."""
    return name if name.isalpha() and name.isascii() and (len(name) == 1 or name.isupper()) else ""


def _is_inverse(node: Node) -> bool:
    if node.kind != "power" or node.parts[1].kind != "number" or node.parts[1].value.denominator != 1:
        return False
    return node.parts[1].value < 0 and any(name.isupper() for name in node.parts[0].symbols())


def _adds_identity(node: Node) -> bool:
    """Return whether a formula is a sum with the matrix I as a term, maybe times a number."""

    def is_identity(term: Node) -> bool:
        if term.kind in ("negative", "product"):
            return _IDENTITY in term.parts and all(part.kind == "number" or part == _IDENTITY for part in term.parts)
        return term == _IDENTITY

    return node.kind == "sum" and any(map(is_identity, node.parts))


class _Evaluation:
    """Value of a formula as a matrix. A number is a multiple of the unit matrix.

    `gram_matrices` are the inverted matrices with transposes, like A^TA. Two formulas must have the same ones, because
    A may not be square: (A^TA)^{-1}A^T is not A^{-1}.
    """

    def __init__(self, has_identity: bool) -> None:
        self._has_identity = has_identity
        self.gram_matrices: set[Matrix] = set()

    def value(self, node: Node) -> Matrix:
        """Return a formula's value as a matrix. Raises NoValueError for formulas that have none."""
        if node.kind == "number":
            return _scale(_UNIT_MATRIX, _residue(node.value))
        if node.kind == "symbol":
            return self._value_of_name(node.value)
        parts = [self.value(part) for part in node.parts]
        if node.kind == "sum":
            return tuple(
                tuple(sum(cells) % _PRIME for cells in zip(*rows, strict=True)) for rows in zip(*parts, strict=True)
            )
        if node.kind == "product":
            return _multiply(parts)
        if node.kind == "quotient":
            return _multiply([parts[0], _invert(parts[1])])
        if node.kind == "negative":
            return _scale(parts[0], -1)
        if node.kind == "transpose":
            return tuple(zip(*parts[0], strict=True))
        if node.kind == "power" and node.parts[1].kind == "number":
            is_gram = (
                any(part.kind == "transpose" for part in node.parts[0].walk()) and node.parts[0].kind != "transpose"
            )
            if is_gram and node.parts[1].value < 0:
                self.gram_matrices.add(parts[0])
            return _raise_matrix(parts[0], node.parts[1].value)
        if node.kind == "call" and node.value in ("det", "abs"):
            return _scale(_UNIT_MATRIX, _determinant(parts[0]))
        raise NoValueError

    def _value_of_name(self, name: str) -> Matrix:
        if self._has_identity and name == _IDENTITY.value:
            return _UNIT_MATRIX
        if name in _SCALARS or (len(name) > 1 and name.islower()):
            return _scale(_UNIT_MATRIX, _draw_matrix(name)[0][0])
        return _multiply([_draw_matrix(letter) for letter in _letters_of(name) or [name]])


@lru_cache(maxsize=256)
def _draw_matrix(name: str) -> Matrix:
    generator = random.Random(f"matrix {name}")
    return tuple(tuple(generator.randrange(1, _PRIME) for _ in range(_SIZE)) for _ in range(_SIZE))


def _residue(number: Fraction) -> int:
    return number.numerator * pow(number.denominator, -1, _PRIME) % _PRIME


def _scale(matrix: Matrix, factor: int) -> Matrix:
    return tuple(tuple(cell * factor % _PRIME for cell in row) for row in matrix)


def _multiply(matrices: list[Matrix]) -> Matrix:
    product = _UNIT_MATRIX
    for matrix in matrices:
        columns = tuple(zip(*matrix, strict=True))
        product = tuple(
            tuple(sum(a * b for a, b in zip(row, column, strict=True)) % _PRIME for column in columns)
            for row in product
        )
    return product


def _raise_matrix(matrix: Matrix, exponent: Fraction) -> Matrix:
    if exponent.denominator != 1 or abs(exponent) > _MAX_EXPONENT:
        raise NoValueError
    return _multiply([matrix if exponent > 0 else _invert(matrix)] * abs(int(exponent)))


def _determinant(matrix: Matrix) -> int:
    return sum(matrix[0][column] * cofactor for column, cofactor in enumerate(_cofactors(matrix, 0))) % _PRIME


def _cofactors(matrix: Matrix, row: int) -> Iterator[int]:
    """Yield the cofactors of one row of a 3 x 3 matrix. Cyclic indices make signs unnecessary."""
    next_row, last_row = matrix[(row + 1) % _SIZE], matrix[(row + 2) % _SIZE]
    for column in range(_SIZE):
        next_column, last_column = (column + 1) % _SIZE, (column + 2) % _SIZE
        yield next_row[next_column] * last_row[last_column] - next_row[last_column] * last_row[next_column]


def _invert(matrix: Matrix) -> Matrix:
    determinant = _determinant(matrix)
    if determinant == 0:
        raise NoValueError
    cofactors = tuple(tuple(_cofactors(matrix, row)) for row in range(_SIZE))
    return _scale(tuple(zip(*cofactors, strict=True)), pow(determinant, -1, _PRIME))
