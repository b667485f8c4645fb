"""Estimates from several attempts, against all subsets and numbers from the papers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from math import comb

import numpy as np
import pytest

from megarl.algorithms.estimates import majority_at_k, mean_with_interval, paired_difference, pass_at_k, wilson


@pytest.mark.parametrize("num_attempts", [1, 2, 7, 10])
def test_pass_at_k_is_the_share_of_all_subsets_with_a_correct_attempt(num_attempts: int) -> None:
    for num_correct in range(num_attempts + 1):
        passes = [place < num_correct for place in range(num_attempts)]
        for k in range(1, num_attempts + 1):
            subsets = list(combinations(passes, k))
            expected = sum(map(any, subsets)) / len(subsets)
            assert pass_at_k(num_attempts, num_correct, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_the_closed_form_of_the_paper() -> None:
    for num_attempts, num_correct, k in ((200, 3, 100), (200, 199, 2), (1024, 1, 512), (16, 5, 4)):
        ratios = 1.0 - k / np.arange(num_attempts - num_correct + 1, num_attempts + 1)  # as its figure 3 writes it
        assert abs(pass_at_k(num_attempts, num_correct, k) - (1.0 - np.prod(ratios))) < 1e-9
    assert pass_at_k(4, 2, 2) == 1 - comb(2, 2) / comb(4, 2) == 5 / 6


def votes_won(drawn: Sequence[tuple[bool, str | None]]) -> float:
    """The chance that the most frequent answer is the correct one, where a draw is decided by lot."""
    counts = Counter("right" if is_correct else answer for is_correct, answer in drawn if is_correct or answer)
    most = max(counts.values(), default=0)
    first = [answer for answer, count in counts.items() if count == most]
    return float("right" in first) / max(1, len(first))


@pytest.mark.parametrize("seed", range(8))
def test_majority_at_k_is_the_mean_over_all_subsets(seed: int) -> None:
    draw = random.Random(seed)
    attempts = [(draw.random() < 0.4, draw.choice(["a", "b", "c", None])) for _ in range(9)]
    for k in range(1, 10):
        subsets = list(combinations(attempts, k))
        expected = sum(map(votes_won, subsets)) / len(subsets)
        found = majority_at_k([right for right, _ in attempts], [answer for _, answer in attempts], k)
        assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("num_attempts", [9, 700])
def test_a_vote_of_one_is_the_accuracy(num_attempts: int) -> None:
    right = [number % 3 == 0 for number in range(num_attempts)]
    answers = [None if number % 5 == 0 else str(number % 7) for number in range(num_attempts)]
    assert majority_at_k(right, answers, 1) == sum(right) / num_attempts


def test_estimates_of_alike_problems_are_independent() -> None:
    """One seed for all would give every problem the same error, which no mean over problems makes smaller."""
    right, answers = [True] * 300 + [False] * 400, ["1"] * 300 + ["2"] * 280 + ["3"] * 120
    found = [majority_at_k(right, answers, 5, problem=number) for number in range(8)]
    assert len(set(found)) > 4 and found == [majority_at_k(right, answers, 5, problem=number) for number in range(8)]


def test_a_vote_of_many_attempts_is_exact_at_its_ends() -> None:
    is_correct, answers = [True] * 48 + [False] * 976, ["1"] * 48 + [str(n % 500) for n in range(976)]
    assert majority_at_k(is_correct, answers, 512) == pytest.approx(1.0)
    assert majority_at_k([False] * 1024, [None] * 1024, 512) == 0.0


def test_a_certain_majority_is_exactly_one() -> None:
    """Else its interval would be a bootstrap's, of no width."""
    is_correct, answers = [True] * 70 + [False] * 50, ["1"] * 70 + [str(n) for n in range(50)]
    assert majority_at_k(is_correct, answers, 100) == 1.0
    assert mean_with_interval([majority_at_k(is_correct, answers, k) for k in (90, 100, 110)]).interval == "wilson"


def test_a_vote_of_very_many_attempts_is_estimated() -> None:
    right, answers = [True] * 400 + [False] * 600, ["1"] * 400 + ["2"] * 350 + [None] * 250
    found = majority_at_k(right, answers, 9)
    # A small share of many: as if drawn with replacement.
    draw = random.Random(3)
    attempts = list(zip(right, answers, strict=True))
    expected = np.mean([votes_won(draw.choices(attempts, k=9)) for _ in range(20_000)])
    assert found == pytest.approx(expected, abs=0.03)


def test_equal_shares_have_an_interval_too() -> None:
    found = mean_with_interval([0.5] * 20)
    assert found == pytest.approx((0.5, *wilson(10, 20), "wilson"))
    assert mean_with_interval([0.3])[1:3] == pytest.approx(wilson(0.3, 1))


@pytest.mark.parametrize("k", [0, 5])
def test_more_attempts_than_there_are_is_an_error(k: int) -> None:
    with pytest.raises(ValueError, match=rf"k = {k} .* 4"):
        pass_at_k(4, 1, k)
    with pytest.raises(ValueError, match=rf"k = {k} .* 4"):
        majority_at_k([True] * 4, ["1"] * 4, k)


def test_the_interval_of_a_rate_is_wilsons() -> None:
    # Closed forms: at the ends z**2 / (n + z**2), in the middle a half +- z / (2 sqrt(n + z**2)).
    square = 1.959963984540054**2
    assert wilson(0, 10) == pytest.approx((0.0, square / (10 + square)), abs=1e-12)
    assert wilson(10, 10) == pytest.approx((10 / (10 + square), 1.0), abs=1e-12)
    half = square**0.5 / (2 * (20 + square) ** 0.5)
    assert mean_with_interval([0.0, 1.0] * 10) == pytest.approx((0.5, 0.5 - half, 0.5 + half, "wilson"))


def test_the_interval_of_shares_is_the_bootstraps() -> None:
    values = np.random.default_rng(1).uniform(size=400)
    found = mean_with_interval(values.tolist())
    half = 1.96 * values.std() / 20
    assert (found.value, found.interval) == (pytest.approx(values.mean()), "bootstrap")
    assert found.low == pytest.approx(values.mean() - half, abs=0.15 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.15 * half)
    assert mean_with_interval(values.tolist()) == found
    with pytest.raises(ValueError, match="no problem"):
        mean_with_interval([])


def test_intervals_hold_the_true_rate_as_often_as_they_say() -> None:
    generator = np.random.default_rng(2)
    for num_attempts in (1, 4):
        drawn = generator.binomial(num_attempts, 0.3, size=(200, 60)) / num_attempts
        held = [measure.low <= 0.3 <= measure.high for measure in map(mean_with_interval, drawn.tolist())]
        assert np.mean(held) >= 0.9


def test_the_interval_of_a_rate_stays_within_0_and_1_despite_rounding() -> None:
    # For some of these counts the formula gives 1 + 2e-16 or -1e-17.
    assert all(wilson(count, count)[1] <= 1.0 and wilson(0, count)[0] >= 0.0 for count in range(1, 1000))


@pytest.mark.parametrize(("difference", "bound"), [(1.0, 1.0), (-1.0, -1.0)])
def test_the_interval_of_paired_differences_stays_within_its_range(difference: float, bound: float) -> None:
    # The formula gives 0.6 + 0.58 here.
    measure = paired_difference([difference] * 3)
    assert (measure.high if bound > 0 else measure.low) == bound
    assert measure.low < measure.high


@pytest.mark.parametrize(
    ("gained", "lost", "same", "low", "high"),
    # Agresti and Min 2005 by hand: 1 of 4 gained is 1/6 and 1.959964 * sqrt(2 - 1/6) / 6.
    [(1, 0, 3, -0.2756340, 0.6089673), (6, 2, 12, -0.0744235, 0.4380599)],
)
def test_the_interval_of_paired_differences_is_the_closed_form(
    gained: int, lost: int, same: int, low: float, high: float
) -> None:
    measure = paired_difference([1.0] * gained + [-1.0] * lost + [0.0] * same)
    assert (measure.low, measure.high) == pytest.approx((low, high), abs=1e-6)
