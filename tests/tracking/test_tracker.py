from __future__ import annotations

import io
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarl.config import Recipe
from megarl.tracking.display import Display
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.tracker import Tracker
from megarl.tracking.trackers.tensorboard import TensorBoard
from megarl.types import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    sections = {"name": "small", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}}
    with RunFolder(Recipe.model_validate({**sections, "runs_folder": str(tmp_path)})) as folder:
        folder.begin()
        yield folder


def rows(path: Path) -> list[dict[str, object]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def plain_display() -> tuple[Display, io.StringIO]:
    text = io.StringIO()
    return Display(Console(file=text, width=40, highlight=False)), text


def test_a_step_reaches_json_tensorboard_and_console(folder: RunFolder) -> None:
    display, text = plain_display()
    tracker = Tracker(folder, steps=3, display=display)
    tracker.log(0, {"val/easy/accuracy": 0.25})
    tracker.log(1, {"train/loss": np.float32(0.5), "reward/mean": 1 / 3, "kl/mean": 7})
    tracker.log(3, {"train/loss": float("nan"), "reward/mean": float("-inf")})
    tracker.close()

    written = rows(folder.metrics_file)
    assert [row["step"] for row in written] == [0, 1, 3]
    assert all(row.pop("time/step_seconds") >= 0 for row in written)  # type: ignore[operator]
    assert written == [
        {"step": 0, "val/easy/accuracy": 0.25},
        {"step": 1, "train/loss": 0.5, "reward/mean": 1 / 3, "kl/mean": 7.0},
        {"step": 3, "train/loss": None, "reward/mean": None},
    ]

    events = EventAccumulator(str(folder.tensorboard_folder)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("val/easy/accuracy")] == [(0, 0.25)]
    assert [event.step for event in events.Scalars("train/loss")] == [1, 3]
    assert np.isnan(events.Scalars("train/loss")[1].value)

    lines = text.getvalue().splitlines()
    assert len(lines) == 4, "a header and one line a step, however narrow the terminal"
    assert lines[0] == "step 0/3  val/easy/accuracy=0.250"
    assert lines[1].split() == ["reward", "s/step", "left"]
    assert lines[2].startswith("step 1/3   0.333 ") and re.search(r" \d:\d\d:\d\d$", lines[2])
    assert lines[3].startswith("step 3/3    -inf ") and lines[3].endswith(" 0:00:00")
    assert "\x1b" not in text.getvalue()


def test_a_summary_has_the_first_and_the_last_accuracy_and_the_time_of_phases(folder: RunFolder) -> None:
    display, text = plain_display()
    tracker = Tracker(folder, steps=2, display=display)
    with tracker.phase("rollout"):
        time.sleep(0.06)
    tracker.log(0, {"val/easy/accuracy": 0.25, "val/easy/accuracy/low": 0.1})
    tracker.log(1, {"reward/mean": 1.0})
    tracker.log(2, {"val/easy/accuracy": 0.5, "val/hard/accuracy": float("nan")})
    tracker.close()
    text.truncate(0)
    tracker.summary(["megarl report small"], has_model=True)
    done, model, accuracy, phases, then = text.getvalue().replace("\0", "").splitlines()
    assert done.startswith("done      2 steps in 0:00:0") and model == f"model     {folder.model_folder}"
    assert accuracy == "accuracy  easy 0.25 -> 0.5" and phases.startswith("time      rollout 0.")
    assert then == "next      megarl report small"


def test_phases_add_up_within_a_step_and_start_anew_with_the_next(folder: RunFolder) -> None:
    tracker = Tracker(folder, display=plain_display()[0])
    for _ in range(2):
        with tracker.phase("rollout"):
            time.sleep(0.02)
    with pytest.raises(ZeroDivisionError), tracker.phase("train"):
        raise ZeroDivisionError
    tracker.log(1, {})
    with tracker.phase("train"):
        time.sleep(0.01)
    tracker.log(2, {})
    first, second = rows(folder.metrics_file)
    assert 0.04 <= first["time/rollout_seconds"] <= first["time/step_seconds"]  # type: ignore[operator]
    assert set(first) == {"step", "time/step_seconds", "time/rollout_seconds", "time/train_seconds"}
    assert set(second) == {"step", "time/step_seconds", "time/train_seconds"}
    tracker.close()


def test_a_step_is_logged_once(folder: RunFolder) -> None:
    tracker = Tracker(folder, display=plain_display()[0])
    tracker.log(2, {})
    with pytest.raises(ValueError, match="step 2 is logged after step 2"):
        tracker.log(2, {})
    tracker.close()
    assert len(rows(folder.metrics_file)) == 1


def test_metrics_are_on_disk_as_soon_as_they_are_logged(folder: RunFolder) -> None:
    tracker = Tracker(folder, display=plain_display()[0])
    tracker.log(1, {"train/loss": 2.0})
    assert rows(folder.metrics_file)[0]["train/loss"] == 2.0
    tracker.close()


def test_samples_are_kept_word_for_word(folder: RunFolder) -> None:
    tracker = Tracker(folder, display=plain_display()[0])
    completion = "<b>é</b>\n\n    # [no] *markup* \u2028 \\boxed{3}"
    records = [
        {"completion": completion, "reward": np.float64(1.5), "token_ids": np.array([2, 3, 5])},
        *({"completion": str(place), "reward": float("nan")} for place in range(5)),
    ]
    tracker.samples(12, records)
    tracker.samples(12, [{"set": "easy", "completion": "later"}])
    said = [{"role": "user", "content": "Higher.", "name": "host"}, {"role": "tool", "content": "7\n8"}]
    tracker.samples(12, [{"set": "hard", "turns": [{"completion": "4", "reward": None, "observation": said}] * 2}])
    tracker.close()
    lines = (folder.samples_folder / "step_000012.jsonl").read_text(encoding="utf-8").split("\n")
    read = [json.loads(line) for line in lines if line]
    assert read[0] == {"completion": completion, "reward": 1.5, "token_ids": [2, 3, 5]}
    assert read[1]["reward"] is None
    assert read[-2] == {"set": "easy", "completion": "later"} and len(read) == 8
    events = EventAccumulator(str(folder.tensorboard_folder)).Reload()
    shown = events.Tensors("samples/train/0/text_summary")[0]
    assert shown.step == 12
    # Four spaces make it code, which TensorBoard shows as it is.
    assert "    <b>é</b>\n    \n        # [no] *markup*" in shown.tensor_proto.string_val[0].decode()
    turn = ["completion: 4", "observation: user: Higher.", "  {'name': 'host'}", "tool: 7", "8"]
    expected = "**turns**\n\n" + "\n".join(f"    {line}" for line in [*turn, *turn])
    assert expected in events.Tensors("samples/hard/0/text_summary")[0].tensor_proto.string_val[0].decode()
    assert [tag for tag in events.Tags()["tensors"] if "/4/" in tag or "easy" in tag] == ["samples/easy/0/text_summary"]


def test_text_that_no_file_can_hold_is_written_as_its_escape(folder: RunFolder) -> None:
    tracker = Tracker(folder, display=plain_display()[0])
    tracker.samples(1, [{"prompt": "a", "completion": "b\ud800c"}])
    tracker.close()
    assert rows(folder.samples_folder / "step_000001.jsonl") == [{"prompt": "a", "completion": "b\\ud800c"}]


def test_warnings_and_tokens_are_in_the_run_folder(folder: RunFolder) -> None:
    display, text = plain_display()
    tracker = Tracker(folder, display=display)
    tracker.notice("before")
    tracker.log(4, {})
    for _ in range(2):
        tracker.notice_once("gap", "after \ud800")
    noted = rows(folder.logs_folder / "notices.jsonl")
    assert [(line["step"], line["text"]) for line in noted] == [(None, "before"), (4, "after \ud800")]
    assert text.getvalue().count("warning: ") == 2
    tracker.token_samples(4, [{"columns": {"text": ["a"], "advantage": [float("nan")]}}])
    assert rows(folder.tokens_folder / "step_000004.jsonl") == [{"columns": {"text": ["a"], "advantage": [None]}}]
    assert list(folder.samples_folder.iterdir()) == []
    tracker.close()


def test_without_tensorboard_a_run_goes_on_with_one_warning(folder: RunFolder) -> None:
    folder.tensorboard_folder.write_text("a file where the folder should be")
    display, text = plain_display()
    tracker = Tracker(folder, display=display)
    tracker.log(1, {"train/loss": 2.0})
    tracker.samples(1, [{"completion": "x"}])
    tracker.log(2, {"train/loss": 3.0})
    tracker.close()
    assert [row["train/loss"] for row in rows(folder.metrics_file)] == [2.0, 3.0]
    assert text.getvalue().count("warning: ") == 1
    assert "tracker tensorboard failed (" in text.getvalue()


def test_tensorboard_that_fails_later_does_not_stop_the_run(folder: RunFolder) -> None:
    display, text = plain_display()
    tracker = Tracker(folder, display=display)
    tracker.log(1, {"train/loss": 2.0})
    tensorboard = tracker._trackers["tensorboard"]
    assert isinstance(tensorboard, TensorBoard)
    with open(os.devnull) as not_writable:
        os.dup2(not_writable.fileno(), tensorboard.events.file.fileno())
    tracker.log(2, {"train/loss": 3.0})
    tracker.log(3, {"train/loss": 5.0})
    tracker.close()
    assert [row["train/loss"] for row in rows(folder.metrics_file)] == [2.0, 3.0, 5.0]
    assert text.getvalue().count("warning: ") == 1


class Recorder:
    """A tracker as a user would write one."""

    def __init__(self, folder: Path, resumed_step: int) -> None:
        self.lines = [f"{folder.name} from {resumed_step}"]

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        if step == 3:
            raise ConnectionError("the server is away")
        self.lines.append(f"step {step}: {scalars['train/loss']}")

    def samples(self, step: int, records: Sequence[Mapping[str, object]]) -> None:
        self.lines.append(f"samples {step}: {records}")

    def sync(self) -> None:
        self.lines.append("sync")

    def close(self) -> None:
        self.lines.append("close")


def test_a_tracker_of_one_s_own_hears_everything_until_it_fails(folder: RunFolder) -> None:
    display, text = plain_display()
    tracker = Tracker(folder, trackers=(f"{__name__}:Recorder",), display=display)
    recorder = tracker._trackers[f"{__name__}:Recorder"]
    assert type(recorder).__name__ == "Recorder"
    tracker.log(1, {"train/loss": 2.0})
    tracker.samples(1, [{"completion": np.int64(7)}])
    tracker.flush()
    for step in (3, 4):
        tracker.log(step, {"train/loss": 3.0})
    tracker.close()
    assert recorder.lines == ["small from 0", "step 1: 2.0", "samples 1: [{'completion': 7}]", "sync"]  # type: ignore[attr-defined]
    assert [row["step"] for row in rows(folder.metrics_file)] == [1, 3, 4]
    assert text.getvalue().count("failed (ConnectionError: the server is away)") == 1
    assert not folder.tensorboard_folder.exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tensorbord", "unknown tracker 'tensorbord'. Did you mean 'tensorboard'?"),
        ("no_such_module:Class", "cannot import no_such_module"),
        ("own.py:Class", "unknown tracker 'own.py:Class'"),
        ("json:Class", "module json has no class 'Class'"),
    ],
)
def test_a_tracker_that_is_not_there_is_named(folder: RunFolder, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Tracker(folder, trackers=(name,), display=plain_display()[0])
