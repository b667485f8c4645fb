"""The fit of the cost model: its constants are committed, and held-out published steps are predicted."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from statistics import median

import pytest

from megarl.planner.seconds.constants import FITTED, HELD_OUT_ERROR, PRIOR
from tools.checks import plan_search

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def fitted() -> tuple[object, list[float]]:
    return plan_search.fit(plan_search.split()[0])


def test_a_third_of_the_rows_is_held_out_in_groups() -> None:
    rows, out = plan_search.split()
    assert len(out) == 13 and len(rows) == 25
    assert len({row["id"] for row in (*rows, *out)}) == 38
    # Rows of one model in one system are alike, so they are on the same side.
    assert not {plan_search._group(row) for row in rows} & {plan_search._group(row) for row in out}
    assert {row["gpu"] for row in out} == {"h100", "h20", "gb200"}
    # Expected constants are from these rows.
    assert {row["gpu"] for row in rows if row["id"].startswith("megarl")} == {"h200"}


def test_committed_constants_are_those_of_the_fit(fitted: tuple[object, list[float]]) -> None:
    for field in fields(FITTED):
        assert getattr(FITTED, field.name) == pytest.approx(getattr(fitted[0], field.name), rel=0.01), field.name
        # A fit far from what is known of the hardware would describe the rows, not the machines.
        assert 0.4 < getattr(FITTED, field.name) / getattr(PRIOR, field.name) < 2.5, field.name


def test_the_stated_error_is_that_of_the_held_out_rows(fitted: tuple[object, list[float]]) -> None:
    out = plan_search.split()[1]
    # The search has the same formula: no weight update of another system is added.
    errors = [abs(line["error_percent"]) / 100 for line in plan_search.errors(out, FITTED)]
    assert median(errors) == pytest.approx(HELD_OUT_ERROR, abs=0.003)
    of_systems = [abs(line["error_percent"]) / 100 for line in plan_search.errors(out, FITTED, fitted[1])]
    assert median(of_systems) < median(errors)
    # The guide states both, and the largest.
    guide = " ".join((ROOT / "megarl/reshard/README.md").read_text(encoding="utf-8").split())
    assert f"On held-out steps its median error is {median(errors):.0%}".replace("%", " %") in guide
    assert f"the largest {max(errors):.0%}".replace("%", " %") in guide
    assert f"the median is {median(of_systems):.0%}".replace("%", " %") in guide
    # The prior alone is worse: the fit learns something that holds for other rows.
    of_prior = plan_search.errors(out, PRIOR)
    assert median(abs(line["error_percent"]) / 100 for line in of_prior) > 1.1 * median(errors)
