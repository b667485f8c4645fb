"""Estimates from several attempts at each problem of a set: pass@k, majority@k, and 95 % intervals. No torch."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import lru_cache
from math import comb, sqrt
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Z95 = 1.959963984540054
"""The 97.5 % quantile of the standard normal distribution."""
NUM_RESAMPLES = 1000
"""Number of bootstrap resamples."""
MAX_EXACT = 128
"""Maximum attempts per problem for an exact majority@k. The time grows with their cube."""
NUM_DRAWN = 4096
"""Number of random subsets of attempts that estimate majority@k above `MAX_EXACT` attempts."""
# The first bounds the rounding error of summed counts. The second bounds the bootstrap's memory: 4 Mi indices of 8
# bytes at once.
_ROUNDING = 1e-12
_DRAWN_AT_ONCE = 1 << 22


class Measure(NamedTuple):
    """A mean over problems with its 95 % interval, and the interval's method."""

    value: float
    low: float
    high: float
    interval: Literal["wilson", "bootstrap", "agresti_min"]


def pass_at_k(num_attempts: int, num_correct: int, k: int) -> float:
    """Return the probability that one of k attempts drawn from all is correct: 1 - C(n - c, k) / C(n, k).

    n is `num_attempts`, c is `num_correct`. The estimate is unbiased. Raises ValueError for k > n. Source: Chen et al.
    2021 (arXiv 2107.03374), eq. 1.
    """
    _check_k(num_attempts, k)
    return 1.0 - comb(num_attempts - num_correct, k) / comb(num_attempts, k)


def majority_at_k(is_correct: Sequence[bool], answers: Sequence[Hashable | None], k: int, *, problem: int = 0) -> float:
    """Return the unbiased estimate that the most frequent of k answers is correct: a mean over all subsets of k.

    All correct attempts count as one answer; `answers` distinguish wrong attempts. An attempt with answer None does not
    vote. Answers with equally many votes are equally likely to be chosen. Above `MAX_EXACT` attempts, the mean is over
    `NUM_DRAWN` random subsets with `problem` as seed. Distinct seeds give problems independent errors. With k = 1 the
    value is exactly the fraction of correct attempts. Raises ValueError for k above the number of attempts.

    Source: self-consistency (arXiv 2203.11171), with subsets as in Chen et al. 2021.
    """
    num_attempts = len(is_correct)
    _check_k(num_attempts, k)
    if k == 1:
        return sum(is_correct) / num_attempts
    wrong_answers = [answer for answer, is_right in zip(answers, is_correct, strict=True) if not is_right]
    wrong_counts = Counter(answer for answer in wrong_answers if answer is not None)
    num_silent = len(wrong_answers) - wrong_counts.total()
    vote_counts = (sum(is_correct), tuple(sorted(wrong_counts.values())), num_silent, k)
    if not any(is_correct):
        return 0.0
    return (
        _exact_majority_at_k(*vote_counts) if num_attempts <= MAX_EXACT else _drawn_majority_at_k(*vote_counts, problem)
    )


@lru_cache(maxsize=1 << 14)
def _drawn_majority_at_k(num_correct: int, wrong_counts: tuple[int, ...], num_silent: int, k: int, seed: int) -> float:
    """Estimate `_exact_majority_at_k` from random subsets. `num_silent` attempts have no answer."""
    generator = np.random.default_rng(seed)
    drawn_counts = generator.multivariate_hypergeometric([num_correct, *wrong_counts, num_silent], k, size=NUM_DRAWN)
    votes = drawn_counts[:, :-1]
    most_votes = votes.max(axis=1)
    num_tied = (votes == most_votes[:, None]).sum(axis=1)
    # Column 0 has the votes of the correct answer. Among tied answers, each is chosen with equal probability.
    is_correct_first = (votes[:, 0] == most_votes) & (most_votes > 0)
    return float(is_correct_first.astype(np.float64).dot(1.0 / num_tied) / NUM_DRAWN)


@lru_cache(maxsize=1 << 14)
def _exact_majority_at_k(num_correct: int, wrong_counts: tuple[int, ...], num_silent: int, k: int) -> float:
    """Return the exact probability that the most frequent answer of k drawn attempts is correct.

    Ties are decided at random. The counts are of correct attempts, of each wrong answer (ascending), and of attempts
    without an answer.
    """
    weighted_wins = 0.0
    for votes in range(1, min(num_correct, k) + 1):
        # ways_by_ties[t, d]: the ways to draw d other attempts such that t wrong answers have equally many votes and
        # none has more.
        num_others = k - votes
        ways_by_ties = np.zeros((num_others // votes + 1, num_others + 1))
        # Answers with too few attempts to reach `votes` can be drawn without any condition.
        num_unrestricted = num_silent + sum(answer_count for answer_count in wrong_counts if answer_count < votes)
        ways_by_ties[0, : num_unrestricted + 1] = [
            float(comb(num_unrestricted, num_drawn)) for num_drawn in range(min(num_unrestricted, num_others) + 1)
        ]
        for answer_count in wrong_counts[bisect_left(wrong_counts, votes) :]:
            ways_with_answer = ways_by_ties.copy()
            for num_drawn in range(1, min(votes - 1, num_others) + 1):
                ways_with_answer[:, num_drawn:] += (
                    comb(answer_count, num_drawn) * ways_by_ties[:, : num_others + 1 - num_drawn]
                )
            if votes <= num_others:
                ways_with_answer[1:, votes:] += comb(answer_count, votes) * ways_by_ties[:-1, : num_others + 1 - votes]
            ways_by_ties = ways_with_answer
        # If t wrong answers tie with the correct one, it is chosen with probability 1 / (t + 1).
        win_weights = ways_by_ties[:, num_others] / np.arange(1, len(ways_by_ties) + 1)
        weighted_wins += comb(num_correct, votes) * float(win_weights.sum())
    win_share = weighted_wins / comb(num_correct + sum(wrong_counts) + num_silent, k)
    # Sums of large counts are rounded, but a certain result must be exactly 0 or 1.
    return float(round(win_share)) if abs(win_share - round(win_share)) < _ROUNDING else win_share


def _check_k(num_attempts: int, k: int) -> None:
    if not 1 <= k <= num_attempts:
        raise ValueError(f"k = {k} must be between 1 and the number of attempts, {num_attempts}")


def mean_with_interval(values: Sequence[float]) -> Measure:
    """Return the mean of one number per problem, each between 0 and 1, with a 95 % interval.

    The interval is Wilson's if each number is 0 or 1, or if all numbers are equal (then it is too wide).
    Otherwise it is the percentile bootstrap over problems, with `NUM_RESAMPLES` resamples and a fixed seed. Both treat
    the problems as a sample of all similar problems. Raises ValueError without problems. Source: Wilson 1927; Efron
    1979.
    """
    if not len(values):
        raise ValueError("the mean over problems cannot be computed: there are no problems")
    array = np.asarray(values, np.float64)
    mean = float(array.mean())
    if np.isin(array, (0.0, 1.0)).all() or np.ptp(array) == 0:
        return Measure(mean, *wilson(float(array.sum()), len(array)), "wilson")
    return Measure(mean, *_bootstrap(array), "bootstrap")


def mean_score(values: Sequence[float]) -> Measure:
    """Return the mean of one score (or difference) per problem, any finite numbers, with a 95 % interval.

    The interval is the percentile bootstrap of `mean_with_interval`; if all values are equal, its width is 0. Raises
    ValueError without problems.
    """
    if not len(values):
        raise ValueError("the mean over problems cannot be computed: there are no problems")
    array = np.asarray(values, np.float64)
    return Measure(float(array.mean()), *_bootstrap(array), "bootstrap")


def paired_difference(differences: Sequence[float]) -> Measure:
    """Return the mean of one difference per problem, each between -1 and 1, with a 95 % interval.

    If each difference is -1, 0 or 1, the interval is Agresti and Min's. It has a width even if all are 0. Otherwise it
    is the percentile bootstrap of `mean_with_interval`. Raises ValueError without problems. Source: Agresti and Min
    2005 (Statistics in Medicine 24), adding one half to each of the four counts.
    """
    if not len(differences):
        raise ValueError("the mean difference over problems cannot be computed: there are no problems")
    array = np.asarray(differences, np.float64)
    mean = float(array.mean())
    if not np.isin(array, (-1.0, 0.0, 1.0)).all():
        return Measure(mean, *_bootstrap(array), "bootstrap")
    # One half added to each of four counts adds 2 to the total, and 1 to the sum of gained and lost.
    num_gained, num_lost, count_plus_two = int((array > 0).sum()), int((array < 0).sum()), len(array) + 2
    centre = (num_gained - num_lost) / count_plus_two
    half_width = Z95 * sqrt(num_gained + num_lost + 1 - (num_gained - num_lost) ** 2 / count_plus_two) / count_plus_two
    return Measure(mean, max(-1.0, centre - half_width), min(1.0, centre + half_width), "agresti_min")


def _bootstrap(array: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean, by bootstrap with a fixed seed."""
    generator = np.random.default_rng(0)
    # Resample in parts, to bound the memory of the random indices.
    resamples_per_part = max(1, _DRAWN_AT_ONCE // len(array))
    part_sizes = [
        min(resamples_per_part, NUM_RESAMPLES - start) for start in range(0, NUM_RESAMPLES, resamples_per_part)
    ]
    means = np.concatenate(
        [
            array[generator.integers(len(array), size=(num_resamples, len(array)))].mean(axis=1)
            for num_resamples in part_sizes
        ]
    )
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def wilson(num_correct: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % score interval of the rate `num_correct` / `count`."""
    rate, variance_term = num_correct / count, Z95**2 / count
    centre = (rate + variance_term / 2) / (1 + variance_term)
    half_width = Z95 / (1 + variance_term) * sqrt(rate * (1 - rate) / count + variance_term / (4 * count))
    return max(0.0, centre - half_width), min(1.0, centre + half_width)
