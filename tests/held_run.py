"""A run that a test holds in the middle of a step, to harm or change it there."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.child_processes import rank_processes
from tests.forked_command import MEGARL
from tests.logged_steps import logged_steps

REWARD = """
import os
import time

from megarl.types import Reward


def share_of_digits(completion_text, answer, correct_score):
    while os.path.exists("hold"):
        time.sleep(0.02)
    return Reward(sum(c.isdigit() for c in completion_text) / max(1, len(completion_text)), True, False)
"""
"""Reward function of a held run. It waits while the run's working folder has a file named `hold`."""
COMPARED = ("reward/mean", "train/loss", "train/grad_norm", "train/entropy", "rollout/sampled_tokens")
"""Metrics that show whether two runs trained alike."""
PATIENCE_SECONDS = 600.0


class HeldRun:
    """A run in progress, started in `folder` as run `name` with the arguments of `megarl train`."""

    def __init__(self, folder: Path, name: str, *arguments: str, program: Sequence[str] = MEGARL) -> None:
        self.path = folder / "runs" / name
        self._folder, self._program, self._arguments = folder, program, (*arguments, f"name={name}")
        self.start()

    def start(self, *options: str) -> None:
        """Start the command, again with an option like `--resume`."""
        command = [*self._program, "train", *self._arguments, *options]
        with (self._folder / "screen").open("w") as screen:
            self.driver = subprocess.Popen(command, cwd=self._folder, stdout=screen, stderr=subprocess.STDOUT)

    def screen(self) -> str:
        """Return what the command has printed."""
        return (self._folder / "screen").read_text()

    def steps(self) -> list[dict[str, float]]:
        """Return the metrics of each complete step."""
        return steps_of(self.path)

    def ranks(self) -> dict[int, int]:
        """Return the process of each rank on this machine."""
        return rank_processes(self.driver.pid)

    def wait_for(self, is_reached: Callable[[], object]) -> None:
        """Wait for an event of the run. Fails if the run ends before, or after ten minutes."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not is_reached():
            assert self.driver.poll() is None, self.screen()
            assert time.monotonic() < deadline, self.screen()
            time.sleep(0.05)

    def await_steps(self, count: int) -> None:
        """Wait until the run has at least `count` complete steps."""
        self.wait_for(lambda: len(self.steps()) >= count)

    @contextmanager
    def held(self, after: int) -> Iterator[None]:
        """Context: the run waits in the middle of a step, after at least `after` complete ones."""
        self.await_steps(after)
        (self._folder / "hold").touch()
        yield
        (self._folder / "hold").unlink()

    def finish(self) -> None:
        """Wait for the run's good end."""
        assert self.driver.wait(PATIENCE_SECONDS) == 0, self.screen()


def steps_of(run: Path) -> list[dict[str, float]]:
    """Return the metrics of each complete step in a run's folder."""
    return [step for step in logged_steps(run) if step["step"]]


def assert_trained_alike(expected: Sequence[Mapping[str, float]], found: Sequence[Mapping[str, float]]) -> None:
    """Assert that two runs have the same steps, with compared metrics equal to a relative 1e-4."""
    for one, other in zip(expected, found, strict=True):
        for name in COMPARED:
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), (other["step"], name)


def difference(expected: Sequence[Mapping[str, float]], found: Sequence[Mapping[str, float]]) -> float:
    """Return the largest difference of the compared metrics, relative to the larger of 1 and the expected value.

    It is infinite if one of the runs has steps that the other one lacks.
    """
    if [step["step"] for step in expected] != [step["step"] for step in found]:
        return float("inf")
    return max(
        abs(a[name] - b[name]) / max(1.0, abs(a[name]))
        for a, b in zip(expected, found, strict=True)
        for name in COMPARED
        if name in a or name in b
    )
