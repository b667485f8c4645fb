"""Answers of every kind against verdicts written by hand, and hostile answers against the clock."""

from __future__ import annotations

import time

import pytest

from megarl.rewards.maths.agreement import agreement
from tests.rewards.verdict_pairs import TABLES, pairs

HOSTILE = (
    r"10^{10^{10}}", "9^{9^{9}}", r"e^{e^{e^{e^{10}}}}", r"9999^{9999}\pi", r"\sin(10^{9999})", r"\frac{1}{0}",
    r"10^{9999}!", r"(10^{9})!", r"\binom{10^9}{10^8}", "x!!!!!!!!", r"\cosh(99999)", "i^{i^{i^{i^{i}}}}",
    r"\exp(\exp(\exp(100)))",
    r"\sqrt{" * 200 + "2" + "}" * 200, r"\frac{1}{" * 150 + "2" + "}" * 150, "{" * 900, "(" * 900, "|" * 900,
    "f(" * 200 + "x" + ")" * 200, "x^" * 450 + "2", "a_" * 400, "-" * 900, r"1\pm" * 200 + "1", "'" * 900, "\\" * 900,
    "9" * 990, "0." + "3" * 900 + "...", "1e" + "9" * 500, "1e99999", r"\sqrt[64]{" + "9" * 900 + "}",
    r"\sqrt[9999999]{2}", r"\lfloor 10^{9000}\pi\rfloor", "(x+1)^{10000}", r"((2^{9000})^{9000})^{9000}",
    "1+" * 499 + "1", "1," * 499, r"\{" + "x_1," * 150 + r"x_2\}", "(1,2)," * 160 + "(1,2)",
    r"\sum_{k=1}^{10^9}k", r"\prod_{k=1}^{999}k!", r"\sum_{a=1}^{99}" * 40 + "a", r"\sum_{k=1}^{n}\sin(k)+" * 30 + "1",
    r"(\frac{1}{3})!+10^{200}", r"\gcd(10^{9999},10^{9998}x)", r"\max\{" * 90, "1-" * 400 + "1", "1:" * 400 + "1",
    "1" * 300 + "a" * 300 + "1" * 300, r"3\pmod" * 150 + "7", r"\color[" * 120, "the value of " * 70 + "is 7",
    "p or q and " * 80 + "p", r"\vec a\times" * 60 + r"\vec a",
    "x<1 or " * 120 + "x>2",
    r"(0,1)\cup" * 90 + "(0,1)", "x<" * 400 + "2", r"|x|<" * 200 + "2", r"\{x\mid " * 100, "1&" * 400,
    r"\begin{pmatrix}" * 50, r"\sin" * 190 + "x", r"\frac" * 200, r"\text{" * 100, "5 m/" * 200, "." * 100_000 + "x",
    r"\text{" * 160 + "n is an integer", "," + " " * 900 + "integer", r"x\in{" * 180,
    "y=" + "+".join(rf"\zeta({place}.{place})" for place in range(10, 50)), "y=" + r"\zeta(x)+" * 90 + "1",
    r"|x|+10^{300}\zeta(x+.1)" + "".join(rf"-10^{{300}}\zeta(x+.{place})" for place in range(10, 38)),
    r"10^{300}\zeta(1.1)" + "".join(rf"-10^{{300}}\zeta(1.{place})" for place in range(10, 38)),
    "{" * 100_000, "1 " * 100_000, r"\," * 50_000 + "x", "1," * 100_000, "\u0663" * 100, "\x00" * 10,
)  # fmt: skip
GOLDS = (
    "7",
    "x^2+1",
    r"\{1,2,3\}",
    "(0,1)",
    "x>2",
    r"\sqrt{2}",
    "B",
    "no solution",
    r"(-\infty,2)\cup(3,\infty)",
    "x=1, y=2",
)


@pytest.mark.parametrize("table", TABLES)
def test_no_wrong_answer_is_paid(table: str) -> None:
    wrong = [pair for pair in pairs(table) if not pair.is_right]
    assert len(wrong) > 250
    assert [pair for pair in wrong if agreement(pair.answer, pair.gold) > 0] == []


@pytest.mark.parametrize("table", TABLES)
def test_no_right_answer_is_refused(table: str) -> None:
    right = [pair for pair in pairs(table) if pair.is_right]
    assert len(right) > 200
    # None, not a share: most rules are needed by two or three of these answers only.
    assert [pair for pair in right if agreement(pair.answer, pair.gold) < 1] == []


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_answer_takes_no_time_and_earns_nothing(text: str) -> None:
    started = time.process_time()
    paid = [gold for gold in GOLDS if agreement(text, gold) or agreement(gold, text)]
    assert agreement(text + " ", text) == 1.0
    assert time.process_time() - started < 2.0
    assert paid == []
