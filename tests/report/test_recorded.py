from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from megarl.files.folder_lock import HOME, Owner
from megarl.report.curves import (
    MOST_POINTS,
    choose_charts,
    list_fault_counts,
    not_finite,
    phase_times,
    points_for,
    series,
    with_derived,
)
from megarl.report.labels import distinct_labels
from megarl.report.sample_text import make_visible, shortened_text
from megarl.report.samples import histograms, spread
from megarl.tracking.run_record import RunRecord
from megarl.types import ConfigError
from tests.report.made_runs import make_run


def test_torn_and_broken_lines_are_left_out_and_told(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=4)
    good = '{"step": 7, "train/loss": null, "a": NaN, "b": 1e999, "c": true, "d": "x", "e": 2}'
    again = '{"step": 3, "train/loss": 5.0}'
    bad = ["[1]", '{"step": "x"}', '{"step": Infinity}', "{", "\x00"]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n".join([good, again, *bad, '{"step": 8, "train/lo']))
    run = RunRecord.open(folder)
    assert [step for step, _ in run.rows] == [0, 1, 2, 3, 4, 7]
    assert dict(run.rows)[3] == {"train/loss": 5.0}
    last = dict(run.rows)[7]
    assert set(last) == {"train/loss", "a", "b", "e"} and last["e"] == 2
    assert all(math.isnan(last[name]) for name in ("train/loss", "a", "b"))
    assert run.notes == [
        "The last line of metrics.jsonl is cut short; it is left out.",
        "5 lines of metrics.jsonl cannot be read; they are left out.",
    ]
    assert not_finite(run.rows)[0] == {"metric": "train/loss", "steps": 1, "first": 7, "last": 7}


@pytest.mark.parametrize("name", ["config.yaml", "status.json", "metrics.jsonl"])
@pytest.mark.parametrize("content", [None, b"\xff\xfe{", b"[]", b"{a: [", b""])
def test_a_run_that_lacks_a_part_is_read(tmp_path: Path, name: str, content: bytes | None) -> None:
    folder = make_run(tmp_path / "run", steps=4)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    run = RunRecord.open(folder)
    # Of an empty metrics.jsonl there is nothing to show: no step was logged.
    assert bool(run.notes) == (content != b"" or name != "metrics.jsonl")
    assert run.name == "run"


def test_what_is_no_run_is_refused_and_its_runs_are_named(tmp_path: Path) -> None:
    make_run(tmp_path / "runs/first", steps=2)
    with pytest.raises(ConfigError, match=r"it holds the runs first\. Give"):
        RunRecord.open(tmp_path / "runs")
    with pytest.raises(ConfigError, match="there is no such folder"):
        RunRecord.open(tmp_path / "no")
    with pytest.raises(ConfigError, match="is a file"):
        RunRecord.open(tmp_path / "runs/first/config.yaml")


def test_an_end_that_nobody_wrote_is_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=2)
    (folder / "status.json").write_text('{"state": "running", "step": 2}   \n')
    me = asdict(Owner.this_process("run"))
    (folder / HOME).mkdir()
    owner = folder / HOME / "00000001"
    owner.write_text(json.dumps(me))
    assert RunRecord.open(folder).state == "running"
    gone = 2**22 + 1  # no process has so large a number
    owner.write_text(json.dumps({**me, "pid": gone}))
    assert RunRecord.open(folder).state == "ended unseen"
    owner.write_text(json.dumps({**me, "started": me["started"] - 1}))  # the number was used again
    assert RunRecord.open(folder).state == "ended unseen"
    owner.write_text(json.dumps({**me, "pid": gone, "boot_id": "another"}))
    assert RunRecord.open(folder).state == "running"


def test_labels_tell_runs_of_one_name_apart(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / place / "same", steps=2) for place in ("a", "b")]
    runs = [RunRecord.open(folder) for folder in (*folders, make_run(tmp_path / "other", steps=2))]
    assert distinct_labels(runs) == ["a/same", "b/same", "other"]


def test_a_long_run_is_thinned_out_to_means() -> None:
    rows = [(step, {"reward/mean": float(step % 10), "val/a/accuracy": step / 10_000}) for step in range(1, 10_001)]
    rows = [(step, row if step % 1000 == 0 else {"reward/mean": row["reward/mean"]}) for step, row in rows]
    rows[3][1]["reward/mean"] = math.nan
    found = series(rows, 100)
    assert found["is_thinned"] and found["x"] == list(range(100, 10_001, 100))
    reward = found["of"]["reward/mean"]
    assert reward["y"][1:] == [4.5] * 99 and reward["y"][0] == pytest.approx((450 - 4) / 99, rel=1e-4)
    assert (reward["low"][1], reward["high"][1]) == (0, 9)
    accuracy = found["of"]["val/a/accuracy"]
    assert accuracy["i"] == list(range(9, 100, 10)) and accuracy["y"] == [number / 10 for number in range(1, 11)]
    assert points_for([rows]) == MOST_POINTS
    assert series(rows[:50], 100)["of"]["reward/mean"].keys() == {"y"}


def test_an_evaluation_in_a_line_of_its_own_belongs_to_its_step(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=4)
    before = dict(RunRecord.open(folder).rows)[4]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "evaluation_follows": true, "train/loss": 2.0, "time/step_seconds": 1.0}\n')
    assert dict(RunRecord.open(folder).rows)[5] == {"train/loss": 2.0, "time/step_seconds": 1.0}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "val/heldout/accuracy": 0.5, "time/step_seconds": 3.0}\n')
    run = RunRecord.open(folder)
    assert dict(run.rows)[5] == {"train/loss": 2.0, "val/heldout/accuracy": 0.5, "time/step_seconds": 3.0}
    # Earlier versions wrote one line for both.
    assert dict(run.rows)[4] == before and run.notes == []


def test_phases_add_up_to_the_step() -> None:
    row = {
        "time/step_seconds": 10.0,
        "time/rollout_seconds": 4.0,
        "time/rollout_waited_seconds": 4.0,
        "time/train_seconds": 3.0,
        "time/reshard_seconds": 1.0,
        "time/reshard_wire_seconds": 0.5,
        "time/engines_idle": 0.3,
    }
    found = phase_times([(1, row), (2, {**row, "time/step_seconds": 12.0})])
    assert found["of"] == {"rollout": [4, 4], "train": [3, 3], "reshard": [1, 1], "other": [2, 4]}
    assert found["total"] == {"rollout": 8, "train": 6, "reshard": 2, "other": 6}


def test_important_curves_come_first_and_quiet_ones_not_at_all() -> None:
    row = {"train/loss": 1.0, "reward/mean": 0.5, "rollout/turns/mean": 1.0, "kl/capped": 0.0, "kl/update": 0.1}
    speed = {"train/tokens": 200.0, "time/step_seconds": 4.0}
    accuracies = {"val/b/accuracy": 1.0, "val/a/accuracy": 1.0, "val/a/data_source/x/accuracy": 1.0}
    rows = with_derived([(1, {**row, **speed, **accuracies})])
    assert rows[0][1]["derived/tokens_per_second"] == 50.0
    assert [(chart["title"], chart["metric"]) for chart in choose_charts([rows])] == [
        ("Reward", "reward/mean"),
        ("Held-out accuracy: a", "val/a/accuracy"),
        ("Held-out accuracy: b", "val/b/accuracy"),
        ("KL of the update", "kl/update"),
        ("Tokens per second", "derived/tokens_per_second"),
        ("Loss", "train/loss"),
        ("Step time", "derived/later_step_seconds"),
    ]


@pytest.mark.parametrize(("steps", "later"), [([0, 1, 2, 3], [2, 3]), ([1, 2], [2]), ([5], [5]), ([0], [0])])
def test_the_chart_of_step_times_has_no_first_step(steps: list[int], later: list[int]) -> None:
    """The first training step, and an evaluation before it, include the start of ranks and engines."""
    rows = with_derived([(step, {"time/step_seconds": 1.0}) for step in steps])
    assert [step for step, row in rows if "derived/later_step_seconds" in row] == later


def test_faults_are_summed() -> None:
    rows = [(step, {"reward/errors": float(step % 3 == 0), "train/loss": 7.0}) for step in range(1, 11)]
    assert list_fault_counts(rows) == [{"metric": "reward/errors", "sum": 3, "steps": 3, "first": 3, "last": 9}]


def test_hidden_characters_are_shown_and_long_texts_cut() -> None:
    assert make_visible("a\x1b[31m\u202eb\tc\r\nd\x7f\ud800") == "a\u241b[31m<U+202E>b\tc\nd\u2421<U+D800>"
    found = shortened_text("x" * 50 + "y" * 50, 30)
    assert found == "x" * 20 + "\n[... 70 characters left out ...]\n" + "y" * 10


def test_histograms_and_spread() -> None:
    few = histograms([(1, [{"r": 0}, {"r": 1.0}, {"r": 0.0}, {"r": None}]), (2, [{}])], "r")
    assert few == {"values": [0.0, 1.0], "steps": [1], "counts": [[2, 1]]}
    many = histograms([(5, [{"r": number} for number in range(49)])], "r", bins=4)
    assert many["edges"] == [0, 12, 24, 36, 48] and many["counts"] == [[12, 12, 12, 13]]
    assert histograms([], "r") == {}
    assert spread(range(101), 3) == [0, 50, 100] and spread([1, 2], 3) == [1, 2]


def test_the_starts_of_a_run(tmp_path: Path) -> None:
    run = RunRecord.open(make_run(tmp_path / "run", steps=8))
    assert [start.facts["state"] for start in run.starts] == ["failed", "done"]
    assert run.starts[0].config["train.prompts_per_step"] == 8
    assert run.planned_steps == 8
    (run.path / "logs/attempt_2/attempt.json").write_text(json.dumps({"steps": 12}))
    assert RunRecord.open(run.path).planned_steps == 12, "those that train.epochs makes are in no recipe"
    (run.path / "logs/attempt_1/attempt.json").write_text(json.dumps([1]))
    (run.path / "logs/attempt_10").mkdir()
    again = RunRecord.open(run.path).starts
    assert [start.number for start in again] == [1, 2, 10] and again[0].facts == {}
