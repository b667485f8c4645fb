"""Faults on demand: where they happen, what they do, and which are refused."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megarl import faults
from megarl.types import ConfigError
from tests.faults.injection import POINTS, InjectedFaultError, logged_times

PACKAGE = Path(faults.__file__).parent


@pytest.fixture(autouse=True)
def disarmed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(faults, "_injector", None)
    yield


def test_each_point_is_reached_in_one_place_of_its_process() -> None:
    found = [
        (path.relative_to(PACKAGE).parts[0], name)
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r"faults\.reach\(\s*\"(\w+)\"", path.read_text())
    ]
    assert sorted(name for _, name in found) == sorted(POINTS)
    of_driver = {name for room, name in found if room in ("loops", "tracking")}
    assert of_driver == {name for name, point in POINTS.items() if point.process == faults.DRIVER}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param("update:1:kill", "must have the form POINT:RANK:STEP:KIND", id="three fields"),
        pytest.param("updat:1:2:kill", "point 'updat' does not exist; choose from construct, ", id="point"),
        pytest.param("update:one:2:kill", "rank 'one' must be a number, driver or any", id="rank"),
        pytest.param("update:-1:2:kill", "rank '-1' must be a number, driver or any", id="negative rank"),
        pytest.param("update:driver:2:kill", "point update is reached by a rank only", id="driver"),
        pytest.param("manifest:0:2:kill", "point manifest is reached by a driver only", id="rank of the driver's"),
        pytest.param("update:1:last:kill", "step 'last' must be a number or any", id="step"),
        pytest.param("update:1:2:explode", "kind 'explode' does not exist; choose from kill, ", id="kind"),
        pytest.param("update:1:2:nan", "kind nan needs a tensor, and point update has none", id="no tensor"),
        pytest.param("update:1:2:sleep", "only sleep has a number", id="no seconds"),
        pytest.param("update:1:2:sleep:soon", "only sleep has a number", id="seconds"),
        pytest.param("update:1:2:kill:9", "only sleep has a number", id="argument"),
        pytest.param("update:1:2:kill,", "must have the form", id="empty"),
        pytest.param("update:7:2:kill", "rank 7 does not exist; the run has ranks 0 to 1", id="beyond the ranks"),
    ],
)
def test_a_wrong_fault_is_refused(text: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, text)
    with pytest.raises(ConfigError) as caught:
        faults.arm_driver(2)
    assert str(caught.value).startswith(f"{faults.VARIABLE} = ") and problem in str(caught.value)
    assert caught.value.exit_code == 2


def test_outside_of_tests_a_command_ends_before_it_begins(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != faults.TEST_MARK}
    environment[faults.VARIABLE] = "update:1:2:kill"
    command = [sys.executable, "-m", "megarl", "train", "absent.yaml"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "only tests may set it; unset it" in done.stderr


def test_a_fault_happens_once_in_its_process_and_step(capsys: pytest.CaptureFixture[str]) -> None:
    faults.reach("update")
    faults.arm("update:1:2:raise,updated:any:any:raise", "0")
    faults.begin_step(2)
    faults.reach("update")
    with pytest.raises(InjectedFaultError):
        faults.reach("updated")
    faults.reach("updated")
    faults.arm("update:1:2:raise", "1")
    faults.reach("update")
    faults.begin_step(2)
    faults.reach("gradients")
    before = time.time()
    with pytest.raises(InjectedFaultError, match="update:1:2:raise"):
        faults.reach("update")
    faults.reach("update")
    (_, at) = logged_times(capsys.readouterr().err)
    # The log rounds to milliseconds: a logged time may be half a millisecond later than the clock.
    assert before - 0.01 < at <= time.time() + 0.001


@pytest.mark.parametrize(("kind", "number"), [("disk_full", errno.ENOSPC), ("io_error", errno.EIO)])
def test_writes_fail_as_the_kernel_would_let_them(kind: str, number: int) -> None:
    faults.arm(f"save_write:0:any:{kind}", "0")
    with pytest.raises(OSError) as caught:
        faults.reach("save_write")
    assert caught.value.errno == number


@pytest.mark.parametrize(("kind", "first"), [("nan", float("nan")), ("flip", -1.0)])
def test_the_first_value_of_a_tensor_changes(kind: str, first: float) -> None:
    import torch

    weights = torch.arange(1.0, 5.0).reshape(2, 2).requires_grad_()
    faults.arm(f"updated:0:any:{kind}", "0")
    faults.reach("updated", lambda: [weights, torch.zeros(1)])
    np.testing.assert_array_equal(weights.detach().numpy().ravel(), [first, 2.0, 3.0, 4.0])
    weights.sum().backward()


ENDS = {"kill": -signal.SIGKILL, "terminate": -signal.SIGTERM, "exit": 7, "memory": 3, "sleep:0": 0}


@pytest.mark.parametrize("kind", ENDS)
def test_processes_end_as_the_kind_says(kind: str) -> None:
    program = (
        "from megarl import faults\n"
        f"faults.arm('update:0:any:{kind}', '0')\n"
        "faults.reach('update')\n"
        "try:\n    kept = bytearray(1 << 28)\n"
        "except MemoryError:\n    raise SystemExit(3)\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], cwd=PACKAGE.parent, stderr=subprocess.DEVNULL).returncode
        == ENDS[kind]
    )


def test_a_stopped_process_waits_for_its_parent() -> None:
    program = "from megarl import faults\nfaults.arm('load:3:any:stop', '3')\nfaults.reach('load')\n"
    with subprocess.Popen([sys.executable, "-c", program], cwd=PACKAGE.parent, stderr=subprocess.DEVNULL) as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP
        process.send_signal(signal.SIGCONT)
        assert process.wait() == 0
