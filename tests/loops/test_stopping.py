"""Signals to a driver whose steps only wait: what it saves, says and leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megarl.loops.stopping import StopRequest, stop_signals
from megarl.types import EndedError, PeerLostError
from tests.child_processes import start_with_default_signals

PROGRAM = """
import asyncio, os, sys
from megarl.cli import app, main
from megarl.config import Recipe
from megarl.loops.stopping import StopRequest, stacks_on_quit, stopping_at_once
from megarl.tracking.run_folder import RunFolder
from megarl.terminal import Terminal
from megarl.types import StoppedError

phase, runs_folder = sys.argv[1:]
terminal = Terminal(soft_wrap=True)

async def steps(folder):
    stop = StopRequest()
    with stop.listening(terminal.print, folder.path):
        if phase == "steps":
            stop.steps_begin()
            folder.set_status("running", step=3)
        terminal.print("listening")
        while not (stop and phase == "steps"):
            await asyncio.sleep(0.01)
        if os.path.exists(runs_folder + "/busy"):
            await asyncio.sleep(60)
        raise StoppedError(f"{stop.signal_name}: saved after step 3; go on with: megarl train {folder.path} --resume")

@app.command()
def program():
    recipe = {"name": "a", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}, "runs_folder": runs_folder}
    with stopping_at_once(), RunFolder(Recipe.model_validate(recipe)) as folder:
        folder.begin()
        with stacks_on_quit(folder.logs_folder):
            asyncio.run(steps(folder))

main(["program"])
"""


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """A terminal: the end that a person sees and the end that a program has."""
    ours, theirs = pty.openpty()
    yield ours, theirs
    for descriptor in (ours, theirs):
        try:
            os.close(descriptor)
        except OSError:
            continue


@contextmanager
def start(runs_folder: Path, phase: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """The driver; one that a signal has not ended when the test fails is killed."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    with start_with_default_signals([sys.executable, "-c", PROGRAM, phase, str(runs_folder)], **options) as driver:
        try:
            yield driver
        finally:
            driver.kill()


def status(runs_folder: Path) -> dict[str, Any]:
    return json.loads((runs_folder / "a/status.json").read_text())


@pytest.mark.parametrize(
    ("number", "phase", "step", "saved"),
    [
        (signal.SIGINT, "steps", 3, "saved after step 3"),
        (signal.SIGHUP, "steps", 3, "saved after step 3"),
        (signal.SIGINT, "start", 0, "stopped before a step began"),
        (signal.SIGTERM, "start", 0, "stopped before a step began"),
    ],
)
def test_the_first_signal_ends_a_run_with_75(
    tmp_path: Path, number: signal.Signals, phase: str, step: int, saved: str
) -> None:
    with start(tmp_path, phase) as driver:
        assert driver.stdout is not None and driver.stdout.readline() == b"listening\n"
        driver.send_signal(number)
        output, errors = driver.communicate(timeout=120)
    cause = f"{number.name}: {saved}; go on with: megarl train {tmp_path / 'a'} --resume"
    assert driver.returncode == 75, (output, errors)
    assert errors.decode() == f"error: {cause}\n"
    expected = {"state": "stopped", "step": step, "cause": f"StoppedError: {cause}", "exit_code": 75}
    assert status(tmp_path) == expected


def test_a_signal_during_a_recovery_is_a_request_to_save(tmp_path: Path) -> None:
    """Earlier attempts trained steps. `recover` is the time between two attempts."""
    texts: list[str] = []

    async def recover() -> None:
        ended, stop = StopRequest(), StopRequest(has_progress=True)
        with ended.listening(texts.append, tmp_path):
            ended.steps_begin()
        assert not ended
        with stop.listening(texts.append, tmp_path):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.01)
        assert stop.signal_name == "SIGTERM" and len(texts) == 1 and texts[0].startswith("SIGTERM: saving as soon as")
        # A second loss ends the run, because it can no longer save.
        with pytest.raises(EndedError, match="SIGTERM: the run ended without saving"):
            stop.refuse_recovery(PeerLostError("rank 1 was lost"), tmp_path)
        # Between two of these contexts a signal is recorded too.
        later = StopRequest(has_progress=True)
        with later.listening(texts.append, tmp_path):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.01)
        assert later.signal_name == "SIGTERM"
        with pytest.raises(EndedError, match="then a second signal"), later.listening(texts.append, tmp_path):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.01)

    earlier = {number: signal.getsignal(number) for number in stop_signals()}
    try:
        asyncio.run(recover())
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_second_ctrl_c_ends_a_run_at_once(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "busy").touch()
    with start(tmp_path, "steps") as driver:
        assert driver.stdout is not None and driver.stdout.readline() == b"listening\n"
        driver.send_signal(number)
        assert b"a second signal ends it now" in driver.stdout.readline()
        driver.send_signal(signal.SIGINT)
        _, errors = driver.communicate(timeout=30)
    assert driver.returncode == 130, errors
    assert b"then a second signal: the run exited at once, without saving; go on with: megarl train" in errors
    assert (status(tmp_path)["state"], status(tmp_path)["exit_code"]) == ("interrupted", 130)


def test_a_run_outlives_its_terminal_until_it_has_saved(tmp_path: Path, terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    with start(tmp_path, "steps", stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as driver:
        assert os.read(ours, 100).startswith(b"listening")
        os.close(ours)  # the window is closed: what is printed now fails
        driver.send_signal(signal.SIGHUP)
        assert driver.wait(timeout=120) == 75
    assert status(tmp_path)["state"] == "stopped"


def test_what_was_ignored_at_the_start_stays_ignored(tmp_path: Path) -> None:
    nohup = ["nohup", sys.executable, "-c", PROGRAM, "steps", str(tmp_path)]
    with subprocess.Popen(nohup, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as driver:
        assert driver.stdout is not None and driver.stdout.readline() == b"listening\n"
        driver.send_signal(signal.SIGHUP)
        driver.send_signal(signal.SIGINT)
        _, errors = driver.communicate(timeout=120)
    assert driver.returncode == 75 and b"error: SIGINT: saved after step 3" in errors, errors


def test_sigquit_writes_stacks_and_the_run_goes_on(tmp_path: Path) -> None:
    with start(tmp_path, "steps") as driver:
        assert driver.stdout is not None and driver.stderr is not None
        assert driver.stdout.readline() == b"listening\n"
        for count in (1, 2):
            driver.send_signal(signal.SIGQUIT)
            assert b"SIGQUIT: the stacks of driver and ranks are in" in driver.stderr.readline()
            log = (tmp_path / "a/logs/attempt_1/driver.log").read_text()
            assert log.count("Current thread") == count and "in run_until_complete" in log
            # No thread's stack shows where a coroutine waits. The signal may also find the task running.
            assert len(re.findall(r"Task Task-1:\n  File \"<string>\", line \d+ in steps\n", log)) == count
        assert status(tmp_path)["state"] == "running"
        driver.send_signal(signal.SIGTERM)
        driver.communicate(timeout=120)
    assert driver.returncode == 75


def test_a_reader_that_leaves_does_not_end_a_run(tmp_path: Path) -> None:
    with start(tmp_path, "steps") as driver:
        assert driver.stdout is not None and driver.stderr is not None
        assert driver.stdout.readline() == b"listening\n"
        driver.stdout.close()
        driver.send_signal(signal.SIGINT)  # which it tells
        errors = driver.stderr.read()
        assert driver.wait(timeout=120) == 75, errors
    assert status(tmp_path)["state"] == "stopped"
