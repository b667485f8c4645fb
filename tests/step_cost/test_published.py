"""The fit of the cost model: its constants are committed, and held-out published steps are predicted."""

from __future__ import annotations

from dataclasses import fields
from statistics import median

import pytest

from megarl.step_cost.constants import FITTED, HELD_OUT_ERROR, PRIOR
from tools.checks import plan_search


@pytest.fixture(scope="module")
def fitted() -> tuple[object, list[float]]:
    return plan_search.fit(plan_search.split()[0])


def test_a_third_of_the_rows_is_held_out() -> None:
    rows, out = plan_search.split()
    assert len(out) == 13 and len(rows) == 25
    assert len({row["id"] for row in (*rows, *out)}) == 38
    assert {row["gpu"] for row in out} == {"h100", "h200", "gb200"}


def test_committed_constants_are_those_of_the_fit(fitted: tuple[object, list[float]]) -> None:
    for field in fields(FITTED):
        assert getattr(FITTED, field.name) == pytest.approx(getattr(fitted[0], field.name), rel=0.01), field.name
        # A fit far from what is known of the hardware would describe the rows, not the machines.
        assert 0.4 < getattr(FITTED, field.name) / getattr(PRIOR, field.name) < 2.5, field.name


def test_the_stated_error_is_that_of_the_held_out_rows(fitted: tuple[object, list[float]]) -> None:
    out = plan_search.split()[1]
    errors = [abs(line["error_percent"]) / 100 for line in plan_search.errors(out, FITTED, fitted[1])]
    assert median(errors) == pytest.approx(HELD_OUT_ERROR, abs=0.003)
    assert median(errors) <= 0.15
    # The prior alone is worse: the fit learns something that holds for other rows.
    of_prior = plan_search.errors(out, PRIOR, plan_search.REFIT)
    assert median(abs(line["error_percent"]) / 100 for line in of_prior) > 1.5 * median(errors)
