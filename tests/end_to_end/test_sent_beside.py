"""A run whose weights go to its engines beside the next step: what its engines sampled with, and what is measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import TOOLS
from tests.end_to_end.recorded import metrics, unknown_metrics

SMALLEST = "--steps 2 --prompts 2 --samples 8 --tokens 16 --layers 2 --hidden-size 128"


def check_versions(rows: list[dict[str, float]]) -> None:
    """The trainer's log-probs are those of a token's own version: of another one they are not within rounding."""
    gaps = [[row[name] for row in rows if (name := f"logprob_gap/mean/age_{age}") in row] for age in (0, 1)]
    assert gaps[0] and max(gaps[0]) < 1e-6 < 1e-5 < max(gaps[1])


def test_engines_sample_with_each_step_s_weights_while_the_next_one_trains(
    tool: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(TOOLS)
    check = tool("check_sent_beside")
    options = check.options_of(SMALLEST.split())
    check.make_inputs(tmp_path, options)
    rows = check.rows_of(tmp_path, "run", options, overlap=True)
    run = tmp_path / "runs/run"
    every = metrics(run)[1:]
    assert [row["step"] for row in rows] == [3, 4] and [row["step"] for row in every] == [1, 2, 3, 4, 5]
    # A reshard beside a step is in that step's line; the last step's engines get no weights beside anything.
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
