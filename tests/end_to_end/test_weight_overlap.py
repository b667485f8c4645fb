"""A run that sends weights to its engines during the next step: what its engines sampled with, and its metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.recorded_metrics import metrics, unknown_metrics
from tools import check
from tools.checks import weight_overlap

pytestmark = pytest.mark.end_to_end


def check_versions(rows: list[dict[str, float]]) -> None:
    """The trainer's log-probs are those of a token's own version: of another one they are not within rounding."""
    gaps = [[row[name] for row in rows if (name := f"logprob_gap/mean/age_{age}") in row] for age in (0, 1)]
    assert gaps[0] and max(gaps[0]) < 1e-6 < 1e-5 < max(gaps[1])


@pytest.mark.long
def test_engines_sample_with_each_step_s_weights_while_the_next_one_trains(
    tmp_path: Path,
) -> None:
    options = check.parse("weight_overlap", check.load("weight_overlap"), ["--size", "small"])
    weight_overlap.make_inputs(tmp_path, options)
    rows = weight_overlap.rows_of(tmp_path, "run", options, overlap=True)
    run = tmp_path / "runs/run"
    every = metrics(run)[1:]
    assert [row["step"] for row in rows] == [3, 4] and [row["step"] for row in every] == [1, 2, 3, 4, 5]
    # A reshard that overlaps a step is in that step's line. The last step's reshard overlaps none.
    assert ["time/reshard_hidden_seconds" in row for row in every] == [False, True, True, True, True]
    for row in rows:
        assert 0 <= row["time/reshard_hidden_seconds"] <= row["perf/engine_pause_seconds"]
        assert 0 <= row["time/reshard_waited_seconds"] < row["time/step_seconds"]
        # Each was compared with the copy that was sent.
        assert row["time/reshard_verify_seconds"] > 0 and row["rollout/replicas"] == 2
        assert row["reshard/received_bytes"] == row["reshard/sent_bytes"] == rows[0]["reshard/sent_bytes"] > 0
        assert row["staleness/max"] <= 1 and 0 <= row["time/engines_idle"] <= 1
    check_versions(every)
    assert unknown_metrics(run) == set()
