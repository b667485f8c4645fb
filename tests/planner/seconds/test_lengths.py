"""Distributions of completion lengths: log-normal ones cut at a limit, and those of a run's samples/."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from megarl.planner.seconds.lengths import lengths_of_run, log_normal, recorded_lengths
from megarl.types import ConfigError, DataError


@pytest.mark.parametrize(("mean", "limit"), [(490, 2048), (3200, 3946), (4096, 16384)])
def test_a_cut_log_normal_has_the_given_mean_and_limit(mean: int, limit: int) -> None:
    lengths = log_normal(mean=mean, limit=limit, prompt_tokens=100.0)
    assert lengths.mean == pytest.approx(mean, rel=1e-6)
    assert lengths.quantiles.max() <= limit
    assert np.all(np.diff(lengths.quantiles) >= 0)
    assert lengths.sequences.mean() == pytest.approx(mean + 100)


def test_the_survival_is_the_share_of_longer_completions() -> None:
    lengths = recorded_lengths([1, 2, 3, 4], limit=10, prompt_tokens=0.0, source="typed in")
    share = lengths.survival(np.array([0.0, 2.5, 4.0]))
    assert share[0] == 1 and share[1] == pytest.approx(0.5, abs=0.01) and share[2] == 0


def test_more_samples_have_a_longer_longest_one() -> None:
    lengths = log_normal(mean=1000, limit=32768, prompt_tokens=0.0)
    longest = [lengths.longest(number) for number in (1, 16, 512, 2048, 16384)]
    assert longest == sorted(longest) and longest[-1] > 1.2 * longest[2]
    assert longest[0] == pytest.approx(np.median(lengths.quantiles), rel=1e-3)
    assert lengths.longest(1e12) == 32768


def _run(folder: Path, records: Sequence[Mapping[str, object]]) -> Path:
    (folder / "samples").mkdir(parents=True)
    (folder / "config.yaml").write_text("name: measured\n")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 7, "rollout/prompt_tokens/mean": 33.0}) + "\n")
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "samples/step_000007.jsonl").write_text(lines)
    return folder


def test_lengths_of_a_run_are_those_of_its_training_samples(tmp_path: Path) -> None:
    records = [{"tokens": 10 * number} for number in range(1, 102)]
    run = _run(tmp_path / "run", [*records, {"tokens": 9999, "set": "heldout"}])
    lengths = lengths_of_run(run, limit=2000, prompt_tokens=5.0)
    assert lengths.mean == pytest.approx(510, rel=0.01)
    assert lengths.quantiles.max() == pytest.approx(1010, rel=0.01)
    assert lengths.prompt_tokens == 33.0
    assert "101 samples" in lengths.source


def test_a_run_without_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no samples with lengths"):
        lengths_of_run(_run(tmp_path / "run", []), limit=100, prompt_tokens=1.0)
    with pytest.raises(ConfigError, match="no such folder"):
        lengths_of_run(tmp_path / "absent", limit=100, prompt_tokens=1.0)
