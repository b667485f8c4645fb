"""The best model of a run: which step's is kept, through resumes and deaths between two renames."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megarl.config import Recipe
from megarl.loops.saving.best_model import BEST, BestModel, BestRecord
from megarl.types import DataError

COMPANIONS = ("adapter", "drafter")
FOLDERS = {"hf_best", "adapter_best", "drafter_best"}


class Ranks:
    """Writes, where ranks would export a model, how many it has exported; with adapters and a drafter next to it."""

    exports = 0

    async def call(self, method: str, folder: Path) -> None:
        assert method == "export"
        Ranks.exports += 1
        for written in (folder, *(folder.with_name(folder.name.replace("hf", name)) for name in COMPANIONS)):
            written.mkdir()
            (written / "weights").write_text(str(Ranks.exports))


class Run:
    """A run's folder, and the notices of its tracker."""

    def __init__(self, folder: Path, metric: str = "val/a/accuracy") -> None:
        self.folder, self.notices = folder, list[str]()
        self.metric = metric
        self.recipe = Recipe.model_validate(
            {
                "name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t", "validation": {"a": "v"}},
                "evaluation": {"every_steps": 2}, "train": {"steps": 9}, "checkpoint": {"best": metric},
            }
        )  # fmt: skip
        Ranks.exports = 0

    def begin(self, resumed_step: int = 0) -> BestModel:
        folder = SimpleNamespace(path=self.folder, resumed_step=resumed_step)
        tracker = SimpleNamespace(
            phase=lambda name: nullcontext(), notice_once=lambda kind, text: self.notices.append(text)
        )
        return BestModel(self.recipe, cast(Any, folder), cast(Any, tracker), cast(Any, Ranks()))

    def step(self, best: BestModel, number: int, value: float | None) -> None:
        asyncio.run(best.export_candidate(number))
        metrics: Mapping[str, float] = {} if value is None else {self.metric: value}
        best.keep_if_best(number, metrics)

    @property
    def kept(self) -> tuple[int, float]:
        found = json.loads((self.folder / "hf_best/best.json").read_text())
        assert found["metric"] == self.metric
        weights = {name: (self.folder / name / "weights").read_text() for name in FOLDERS}
        assert len(set(weights.values())) == 1
        return found["step"], found["value"]

    @property
    def names(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}


@pytest.mark.parametrize(
    ("metric", "values", "expected"),
    [
        ("val/a/accuracy", [0.25, 0.5, 0.5, 0.375, 0.25], (4, 0.5)),
        ("val/a/loss", [2.0, 1.5, 1.75, float("nan"), 1.5], (4, 1.5)),
    ],
)
def test_the_model_of_the_best_evaluated_step_is_kept(
    tmp_path: Path, metric: str, values: list[float], expected: tuple[int, float]
) -> None:
    run = Run(tmp_path, metric)
    best = run.begin()
    run.step(best, 1, 9.0)  # no evaluation ends it
    assert best.step is None and run.names == set()
    for number, value in zip((2, 4, 6, 8, 9), values, strict=True):
        run.step(best, number, value)
    assert run.kept == expected and best.step == expected[0]
    assert (tmp_path / "hf_best/weights").read_text() == "2"
    assert Ranks.exports == 5 and run.names == FOLDERS


def test_a_resumed_run_goes_on_from_the_best_that_it_had(tmp_path: Path) -> None:
    run = Run(tmp_path)
    first = run.begin()
    run.step(first, 2, 0.5)
    asyncio.run(first.export_candidate(4))  # its evaluation was cut short
    again = run.begin(resumed_step=4)
    assert again.step == 2
    again.keep_if_best(4, {run.metric: 0.75})
    assert run.kept == (4, 0.75)
    # Also what was measured of a step that is trained again: no worse model takes its place.
    later = run.begin(resumed_step=2)
    assert later.step == 4
    run.step(later, 4, 0.625)
    assert run.kept == (4, 0.75)
    run.step(later, 6, 0.875)
    assert run.kept == (6, 0.875)


def test_a_death_between_the_names_of_model_and_adapters_is_ended_by_the_resume(tmp_path: Path) -> None:
    run = Run(tmp_path)
    best = run.begin()
    run.step(best, 2, 0.5)
    asyncio.run(best.export_candidate(4))
    (tmp_path / "hf_candidate/best.json").write_text(json.dumps({"step": 4, "metric": run.metric, "value": 0.75}))
    (tmp_path / "adapter_best").rename(tmp_path / ".adapter_best.replaced")
    (tmp_path / "adapter_candidate").rename(tmp_path / "adapter_best")
    assert run.begin(resumed_step=4).step == 4
    assert run.kept == (4, 0.75) and run.names == FOLDERS


def test_a_death_between_two_renames_loses_no_model(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step(run.begin(), 2, 0.5)
    (tmp_path / "hf_best").rename(tmp_path / ".hf_best.replaced")
    assert run.begin(resumed_step=2).step == 2 and run.kept == (2, 0.5)
    (tmp_path / ".hf_best.replaced").mkdir()
    run.begin(resumed_step=2)
    assert run.names == FOLDERS


def test_a_metric_that_no_evaluation_has_is_reported(tmp_path: Path) -> None:
    run = Run(tmp_path)
    best = run.begin()
    asyncio.run(best.export_candidate(2))
    best.keep_if_best(2, {"val/a/format_valid": 1.0})
    assert run.names == set() and best.step is None
    [notice] = run.notices
    assert "checkpoint.best = val/a/accuracy" in notice and "val/a/format_valid" in notice


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ({}, "step"),
        ({"step": "4"}, "step"),
        ({"step": True}, "step"),
        ({"step": -1}, "step"),
        ({"step": 4, "metric": ["a"]}, "metric"),
        ({"step": 4, "metric": "val/a/accuracy", "value": "high"}, "value"),
        ({"step": 4, "metric": "val/a/accuracy", "value": False}, "value"),
        ({"step": 4, "metric": "val/a/accuracy", "value": 10**400}, "value"),
    ],
)
def test_a_damaged_record_of_the_best_model_is_named(tmp_path: Path, content: object, field: str) -> None:
    (tmp_path / BEST).write_text(json.dumps(content))
    with pytest.raises(DataError, match=rf"{BEST}: {field} = "):
        BestRecord.read(tmp_path)


@pytest.mark.parametrize("record", [BestRecord(3), BestRecord(4, "val/a/loss", 0.25)])
def test_the_record_of_the_best_model_is_read_as_written(tmp_path: Path, record: BestRecord) -> None:
    assert BestRecord.read(tmp_path) is None
    record.write(tmp_path)
    assert BestRecord.read(tmp_path) == record
