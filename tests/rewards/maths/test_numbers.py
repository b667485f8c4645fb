"""The one lexer of numbers, and the two readers of answers that use it."""

from __future__ import annotations

from fractions import Fraction

import pytest

from megarl.rewards.maths.agreement import agreement
from megarl.rewards.maths.equality.exact import exact
from megarl.rewards.maths.equality.rewrites import drop_rounding
from megarl.rewards.maths.formulas.parser import parse
from megarl.rewards.maths.numbers import ANY_SEPARATOR, COMMA, NotMathematicsError, read_based_number, read_number
from megarl.rewards.maths.quantities import read_quantity
from megarl.rewards.maths.units import read_unit

NUMBERS = {
    "7": Fraction(7),
    "007": Fraction(7),
    "7.": Fraction(7),
    ".5": Fraction(1, 2),
    "1,234": Fraction(1234),
    "1,234,567.5": Fraction("1234567.5"),
    "1.5e3": Fraction(1500),
    "1.5E-3": Fraction(3, 2000),
    r"0.1\overline{6}": Fraction(1, 6),
    r"0.\bar3": Fraction(1, 3),
    r"0.\dot{3}": Fraction(1, 3),
    "0.1666...": Fraction(1, 6),
    r"0.1212\ldots": Fraction(4, 33),
    "3 1/2": Fraction(7, 2),
    r"3\frac12": Fraction(7, 2),
    r"\frac{3}{4}": Fraction(3, 4),
    "2.5/5": Fraction(1, 2),
    r"2.5 \times 10^{3}": Fraction(2500),
    "10^{-2}": Fraction(1, 100),
}


@pytest.mark.parametrize(
    ("text", "value"),
    [(r"\sqrt[3]{343}", Fraction(7)), (r"\sqrt{49/4}", Fraction(7, 2)), (r"\sqrt{2}", None), (r"\sqrt[3]{344}", None)],
)
def test_a_root_is_exact_only_if_it_is_rational(text: str, value: Fraction | None) -> None:
    tree = parse(text)
    assert tree is not None and exact(tree) == value


@pytest.mark.parametrize(("text", "value"), [(r"\binom{5}{2}", 10), (r"\binom{2}{5}", 0), (r"\binom{5}{1/2}", None)])
def test_a_binomial_is_exact_for_whole_numbers(text: str, value: int | None) -> None:
    tree = parse(text)
    assert tree is not None and exact(tree) == value


def test_a_rounding_is_dropped_and_the_name_stays() -> None:
    rounded, named = parse(r"x=\frac16\approx0.1667"), parse(r"x=\frac16")
    assert rounded is not None and drop_rounding(rounded) == named


def test_a_unit_has_at_most_four_words() -> None:
    assert read_unit("kg m m s")[0]
    assert not read_unit("kg m m s s")[0]


def test_a_bracket_counts_for_the_nesting_once_it_is_closed_no_longer() -> None:
    deepest = max(depth for depth in range(60) if parse("(" * depth + "x" + ")" * depth) is not None)
    assert parse("(1)" * 50 + "(" * deepest + "x" + ")" * deepest) is not None
    assert parse("(1)" * 50 + "(" * (deepest + 1) + "x" + ")" * (deepest + 1)) is None


@pytest.mark.parametrize("text", NUMBERS)
def test_both_readers_agree(text: str) -> None:
    quantity, tree = read_quantity(text), parse(text)
    assert quantity is not None and quantity.number == NUMBERS[text]
    assert tree is not None and exact(tree) == NUMBERS[text]


@pytest.mark.parametrize(
    ("text", "separator", "value", "rest"),
    [
        ("1,234", None, 1, ",234"),
        ("1,234", COMMA, 1234, ""),
        ("1,23", COMMA, 1, ",23"),
        ("1,2345", COMMA, 1, ",2345"),
        ("1,234,", COMMA, 1, ",234,"),
        (r"1\,234", COMMA, 1, r"\,234"),
        (r"1\,234", ANY_SEPARATOR, 1234, ""),
        ("0,123", ANY_SEPARATOR, 0, ",123"),
        ("1.2.3", COMMA, Fraction("1.2"), ".3"),
        ("0.25. cm", COMMA, Fraction("0.25"), ". cm"),
        ("5..", COMMA, 5, ".."),
        ("0.33...", COMMA, Fraction("0.33"), "..."),
        ("5e3x", COMMA, 5, "e3x"),
        ("1.5e3.5", COMMA, Fraction("1.5"), "e3.5"),
    ],
)
def test_a_number_ends_where_it_is_clear(text: str, separator: str | None, value: Fraction, rest: str) -> None:
    number = read_number(text, 0, separator)
    assert number is not None
    assert (number[0], text[number[1] :]) == (value, rest)


@pytest.mark.parametrize("text", ["", "x", "-5", ",5", ".", "٣", "\\frac12"])
def test_other_texts_begin_with_no_number(text: str) -> None:
    assert read_number(text, 0, ANY_SEPARATOR) is None


@pytest.mark.parametrize("text", ["9" * 1001, "1e1001", "1e-999999", "0." + "3" * 1001 + "..."])
def test_a_huge_number_is_refused(text: str) -> None:
    with pytest.raises(NotMathematicsError):
        read_number(text, 0)
    assert read_quantity(text) is None
    assert parse(text) is None


@pytest.mark.parametrize(
    ("text", "value"), [("101_2", 5), ("1A_{16}", 26), (r"12_{\text{three}}", 5), ("12", None), ("x_2", None)]
)
def test_a_number_with_a_base(text: str, value: int | None) -> None:
    number = read_based_number(text, 0)
    assert number == (None if value is None else (value, len(text)))


@pytest.mark.parametrize("text", ["12_2", "1_1", "1_{99}", r"1_{\text{many}}"])
def test_digits_that_the_base_does_not_have_are_refused(text: str) -> None:
    with pytest.raises(NotMathematicsError):
        read_based_number(text, 0)


@pytest.mark.parametrize("prediction", ["0.25. cm", "2.5.x", "1.5.)", "3.14.15", "0.2525.'.."])
def test_a_stop_after_a_decimal_is_no_error(prediction: str) -> None:
    assert agreement(prediction, "7") == 0.0
    assert agreement("7", prediction) == 0.0
