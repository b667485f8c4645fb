"""The dashboard of a running run: its files are read while another process writes them."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from megarl.config import Recipe
from megarl.files.atomic import append_whole, replace_bytes
from megarl.files.folder_lock import Owner
from megarl.files.pid_space import stat_fields
from megarl.report import watched
from megarl.report.watch import dashboard, watch
from megarl.report.watched import GrowingFile, WatchedRun
from megarl.tracking.display import Display
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.tracker import Tracker
from megarl.types import ConfigError, StorageError
from tests.stand_ins.terminal_screen import run_in_terminal, shown

ROOT = Path(__file__).resolve().parents[2]
WATCH = [sys.executable, "-m", "megarl", "watch"]


class Run:
    """A run of 8 steps that is written step by step, by the classes that write real ones."""

    def __init__(self, folder: Path) -> None:
        sections = {"name": "small", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}}
        recipe = {**sections, "runs_folder": str(folder), "train": {"steps": 8}, "trackers": []}
        self.folder = RunFolder(Recipe.model_validate(recipe))
        self.path = self.folder.path
        self.folder.__enter__()
        self.folder.begin()
        self.tracker = Tracker(self.folder, steps=8, trackers=[], display=Display(Console(file=io.StringIO())))
        self.folder.set_status("running")
        self.is_open = True

    def step(self, number: int) -> None:
        with self.tracker.phase("rollout"):
            pass
        metrics, results = {"reward/mean": number / 8}, {"val/heldout/accuracy": number / 10}
        if number % 2:
            # As earlier versions logged a step, after its evaluation.
            self.tracker.log(number, metrics | results)
        else:
            self.tracker.log(number, metrics, evaluation_follows=True)
            self.tracker.log_evaluation(number, results)
        self.tracker.samples(
            number,
            [
                {
                    "prompt": [{"role": "user", "content": f"Question {number}\x1b[31m?"}],
                    "completion": f"Answer {number}",
                    "reward": 0.5,
                }
            ],
        )
        self.folder.set_status(step=number)

    def end(self, error: BaseException | None = None) -> None:
        self.folder.__exit__(type(error) if error else None, error, None)
        self.is_open = False


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    if made.is_open:
        made.end()


def plain(width: int = 100) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=width, highlight=False), text


def test_a_line_is_read_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = GrowingFile(path)
    assert file.read() == ([], False)
    path.write_bytes(b'{"step": 1}\n{"st')
    assert file.read() == ([b'{"step": 1}'], True)
    assert file.read() == ([], False)
    append_whole(path, b'ep": 2}\n')
    assert file.read() == ([b'{"step": 2}'], False)
    # As NFS shows bytes that have not arrived: as zeros.
    append_whole(path, b'{"step": 3}\n\0\0\0\0')
    assert file.read() == ([b'{"step": 3}'], False)
    with path.open("r+b") as written:
        written.seek(-4, 2)
        written.write(b"{}\n\n")
    assert file.read() == ([b"{}", b""], False)
    replace_bytes(path, b'{"step": 1}\n')
    assert file.read() == ([b'{"step": 1}'], True)


def test_only_the_newest_lines_of_a_large_file_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "_MOST_BYTES", 38)
    path = tmp_path / "metrics.jsonl"
    file = GrowingFile(path)
    path.write_bytes(b"".join(b'{"step": %d}\n' % number for number in range(100)))
    assert file.read() == ([b'{"step": 98}', b'{"step": 99}'], True)
    append_whole(path, b'{"step": 100}\n{"st')
    assert file.read() == ([b'{"step": 100}'], False)
    append_whole(path, b'ep": 101}\n')
    assert file.read() == ([b'{"step": 101}'], False)


def test_a_dashboard_shows_state_metrics_times_warnings_and_samples(run: Run) -> None:
    for number in range(1, 6):
        run.step(number)
    run.tracker.notice("look out")
    console, text = plain()
    assert watch(run.path, console, interval_seconds=1.0, is_once=True) == 0
    screen = text.getvalue()
    head, *_ = screen.splitlines()
    assert head.startswith("small  running  step 5 of 8  ") and " left" in head
    assert [line.strip() for line in screen.splitlines() if "look out" in line] == ["warning: look out"]
    rows = {line.split()[0]: line.split() for line in screen.splitlines() if line.strip()}
    assert rows["reward/mean"] == ["reward/mean", "0.625", "▁▃▅▆█", "0.125", "0.625"]
    assert rows["val/heldout/accuracy"][1] == "0.500" and rows["time/step_seconds"]
    assert "other" in rows and "sample of step 5, train, reward 0.5" in screen
    # A sample cannot send escape sequences.
    assert "Question 5␛[31m?" in screen and "\x1b" not in screen
    assert max(map(len, screen.splitlines())) <= 100


def test_a_value_that_is_not_finite_is_shown_and_not_the_one_before(run: Run) -> None:
    for number, loss in enumerate((0.5, math.nan), 1):
        run.tracker.log(number, {"train/loss": loss, "train/grad_norm": math.inf})
    console, text = plain()
    watch(run.path, console, interval_seconds=1.0, is_once=True)
    rows = {line.split()[0]: line.split() for line in text.getvalue().splitlines() if line.strip()}
    assert rows["train/loss"][1] == "nan" and rows["train/loss"][-1] == "0.500"
    assert rows["train/grad_norm"] == ["train/grad_norm", "nan"]


def test_parts_that_do_not_fit_are_left_out(run: Run) -> None:
    run.step(1)
    watched = WatchedRun(run.path)
    watched.refresh()
    console, text = plain()
    console.print(dashboard(watched, console, most_lines=6))
    assert "reward/mean" in text.getvalue() and "sample of step" not in text.getvalue()
    assert len(text.getvalue().splitlines()) <= 6


def test_without_a_terminal_each_step_has_a_line_until_the_run_ends(run: Run) -> None:
    numbers = iter((2, 3))
    run.step(1)

    def sleep(seconds: float) -> None:
        assert seconds == 0.5
        if (number := next(numbers, None)) is not None:
            run.step(number)
        else:
            run.end(ConfigError("the disk is round"))

    console, text = plain()
    assert watch(run.path, console, interval_seconds=0.5, sleep=sleep) == 2
    lines = text.getvalue().splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["1/8", "2/8", "3/8"]
    assert lines[-1] == "small: failed, step 3 of 8, exit code 2: ConfigError: the disk is round"


def test_a_resumed_run_begins_again_with_the_steps_that_it_kept(run: Run) -> None:
    watched = WatchedRun(run.path)
    for number in (1, 2, 3):
        run.step(number)
    assert watched.refresh() == [1, 2, 3]
    lines = run.folder.metrics_file.read_bytes().splitlines(keepends=True)
    replace_bytes(run.folder.metrics_file, b"".join(lines[:2]))
    assert watched.refresh() == [1, 2] and list(watched.rows) == [1, 2]


def test_a_file_that_is_away_for_a_moment_ends_nothing(run: Run) -> None:
    watched = WatchedRun(run.path)
    run.step(1)
    watched.refresh()
    # As a full disk leaves it: overwritten in place, and half of it seen.
    status = (run.path / "status.json").read_text()
    (run.path / "status.json").write_text(status[: len(status) // 4])
    run.folder.metrics_file.rename(run.path / "moved")
    run.folder.metrics_file.mkdir()
    assert watched.refresh() == [] and "metrics.jsonl: cannot be read" in watched.trouble
    assert watched.state == "running" and watched.step == 1
    with pytest.raises(StorageError, match=r"metrics\.jsonl: cannot be read"):
        watch(run.path, plain()[0], interval_seconds=1.0, is_once=True)
    run.folder.metrics_file.rmdir()
    (run.path / "moved").rename(run.folder.metrics_file)
    watched.refresh()
    assert watched.trouble == "" and list(watched.rows) == [1]


def test_a_run_whose_process_is_gone_has_ended(run: Run) -> None:
    run.step(1)
    ended = subprocess.Popen(["true"])
    ended.wait()
    (owner,) = (run.path / "owners").iterdir()
    own_text = owner.read_text()
    owner.write_text(own_text.replace(f'"pid": {os.getpid()}', f'"pid": {ended.pid}'))
    console, text = plain()
    try:
        assert watch(run.path, console, interval_seconds=1.0) == 70
    finally:
        # Else the lock, when it is released, finds that another process took the folder over.
        owner.write_text(own_text)
    assert text.getvalue().splitlines()[-1] == "small: ended unseen, step 1 of 8"


def lines_until_the_end(run: Run, num_looks: int) -> list[str]:
    """Watch a run through a pipe. The run ends before the last of `num_looks` looks. Return the printed lines."""
    naps = iter(range(num_looks))

    def sleep(_: float) -> None:
        if next(naps) == num_looks - 1:
            run.end()

    console, text = plain()
    assert watch(run.path, console, interval_seconds=1.0, sleep=sleep) == 0
    return text.getvalue().splitlines()


def test_a_silent_driver_is_named_once_and_its_next_heartbeat_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.step(1)
    words = iter(["", "the driver is suspended", "the driver is suspended", ""])
    monkeypatch.setattr(watched.Heartbeats, "describe_silence", lambda self: next(words, ""))
    lines = lines_until_the_end(run, 5)
    assert [line for line in lines if "driver" in line] == ["the driver is suspended", "the driver continues"]


def test_a_driver_that_is_killed_while_it_is_suspended_does_not_continue(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.step(1)
    monkeypatch.setattr(watched.Heartbeats, "describe_silence", lambda self: "the driver is suspended")
    lines = lines_until_the_end(run, 3)
    assert [line for line in lines if "driver" in line] == ["the driver is suspended"]
    assert lines[-1].startswith("small: done")


def test_a_suspended_driver_is_part_of_the_dashboard(run: Run) -> None:
    """The owner is another process, as if it drove the run."""
    run.step(1)
    sleeper = subprocess.Popen(["sleep", "60"])
    (file,) = (run.path / "owners").iterdir()
    own_text = file.read_text()
    owner = Owner.this_process("small")
    file.write_text(json.dumps(asdict(replace(owner, pid=sleeper.pid, started=int(stat_fields(sleeper.pid)[19])))))
    console, text = plain()
    try:
        sleeper.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
        watch(run.path, console, interval_seconds=1.0, is_once=True)
    finally:
        sleeper.kill()
        sleeper.wait()
        file.write_text(own_text)
    assert f"kill -CONT {sleeper.pid}" in " ".join(text.getvalue().split())


def test_a_terminal_has_a_dashboard_that_stays_after_the_end(run: Run) -> None:
    run.step(8)
    run.end()
    code, written = run_in_terminal([*WATCH, str(run.path)], ROOT)
    lines = [line.rstrip() for line in shown(written) if line.strip()]
    assert code == 0 and lines[0].startswith("small  done  step 8 of 8")
    assert any(line.startswith("reward/mean") for line in lines)
    assert lines[-1] == "small: done, step 8 of 8, exit code 0"


@pytest.mark.parametrize(
    ("make", "problem"),
    [(lambda path: None, "there is no such folder"), (Path.mkdir, "this is not a run folder"), (Path.touch, "a file")],
)
def test_other_paths_are_refused(tmp_path: Path, make: Callable[[Path], object], problem: str) -> None:
    path = tmp_path / "other"
    make(path)
    with pytest.raises(ConfigError, match=f"{path}: .*{problem}"):
        watch(path, plain()[0], interval_seconds=1.0)


def test_a_long_run_is_read_without_holding_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: long\n")
    lines = [json.dumps({"step": step, "reward/mean": step}) for step in range(5000)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    watched = WatchedRun(tmp_path)
    watched.refresh()
    assert watched.step == 4999 and len(watched.rows) == 400
    assert watched.values("reward/mean", 3) == [4997, 4998, 4999]
