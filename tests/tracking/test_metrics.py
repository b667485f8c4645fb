from __future__ import annotations

import math
from itertools import permutations

import pytest

from megarl.tracking.metrics import Max, Mean, Metric, Sum, merge, values


@pytest.mark.parametrize(
    ("parts", "value"),
    [
        pytest.param([Mean(2.0, 3), Mean(7.0, 2)], 4.0, id="mean weighs by counts: (6 + 14) / 5"),
        pytest.param([Mean(2.0), Mean(7.0), Mean(3.0)], 4.0, id="mean of single items"),
        pytest.param([Mean(math.nan, 0), Mean(5.0, 2)], 5.0, id="mean over nothing weighs nothing"),
        pytest.param([Mean(0.0, 0), Mean(0.0, 0)], math.nan, id="mean over nothing at all"),
        pytest.param([Mean(math.nan, 1), Mean(5.0, 2)], math.nan, id="mean with a NaN"),
        pytest.param([Sum(2.0), Sum(3.0), Sum(-7.0)], -2.0, id="sum"),
        pytest.param([Max(2.0), Max(11.0), Max(-13.0)], 11.0, id="max"),
        pytest.param([Max(2.0), Max(math.nan), Max(3.0)], math.nan, id="max with a NaN"),
        pytest.param([Max(-math.inf), Max(2.0)], 2.0, id="infinities are numbers"),
    ],
)
def test_merge_in_any_order(parts: list[Metric], value: float) -> None:
    for order in permutations(parts):
        assert values(merge([{"x": part} for part in order])) == {"x": pytest.approx(value, nan_ok=True)}


def test_merging_keeps_the_counts_so_that_merges_nest() -> None:
    inner = merge([{"x": Mean(2.0, 3)}, {"x": Mean(7.0, 2)}])
    assert values(merge([inner, {"x": Mean(10.0, 5)}])) == {"x": pytest.approx(7.0)}


def test_names_may_be_absent_from_some_ranks() -> None:
    merged = merge([{"train/loss": Mean(3.0)}, {}, {"memory/peak_bytes": Max(5.0)}, {"memory/peak_bytes": Max(7.0)}])
    assert values(merged) == {"train/loss": 3.0, "memory/peak_bytes": 7.0}


def test_two_reductions_of_one_name_are_refused() -> None:
    with pytest.raises(TypeError, match="x is a Mean from one rank or microbatch and a Sum from another"):
        merge([{"x": Mean(3.0)}, {"x": Sum(3.0)}])
