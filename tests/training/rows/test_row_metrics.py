"""Metrics of rows: what is not counted changes nothing, and all are read at once."""

from __future__ import annotations

import math

import torch

from megarl.tracking.metrics import Max, Mean, Sum
from megarl.training.rows.metrics import RowMetric, max_of, mean_of, mean_of_all, read_metrics, sum_of
from tests.host_waits import host_waits

VALUES = torch.tensor([1.5, math.nan, 3.0, math.inf, -2.0])
IS_COUNTED = torch.tensor([True, False, True, False, True])
NONE = torch.zeros(5, dtype=torch.bool)


def test_values_that_are_not_counted_change_nothing() -> None:
    row = {"mean": mean_of(VALUES, IS_COUNTED), "all": mean_of_all(VALUES[::2]), "max": max_of(VALUES, IS_COUNTED)}
    [found] = read_metrics([row])
    assert found == {"mean": Mean(2.5 / 3, 3), "all": Mean(2.5 / 3, 3), "max": Max(3.0)}


def test_a_counted_nan_stays() -> None:
    [found] = read_metrics([{"mean": mean_of_all(VALUES), "sum": sum_of(VALUES)}])
    assert math.isnan(found["mean"].value()) and math.isnan(found["sum"].value())


def test_a_row_without_counted_tokens() -> None:
    row = {
        "weightless": mean_of(VALUES, NONE),
        "left out": mean_of(VALUES, NONE, needs_tokens=True),
        "largest": max_of(VALUES, NONE),
    }
    assert read_metrics([row]) == [{"weightless": Mean(0.0, 0)}]
    assert read_metrics([{"largest": max_of(VALUES[:0], NONE[:0])}]) == [{}]


def test_all_rows_are_read_in_one_copy() -> None:
    rows: list[dict[str, RowMetric]] = [
        {"tokens": sum_of(IS_COUNTED), "mean": mean_of_all(VALUES[:1] + n)} for n in range(3)
    ]
    with host_waits() as places:
        found = read_metrics(rows)
    assert sum(places.values()) == 1
    assert found == [{"tokens": Sum(3.0), "mean": Mean(1.5 + number, 1)} for number in range(3)]
    assert read_metrics([{}, {}]) == [{}, {}] and read_metrics([]) == []
