"""Runs of a tiny recipe with a fault on demand: how they ended, how soon, and what they left."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megarl.faults import VARIABLE
from tests.child_processes import is_alive, rank_processes
from tests.faults.injection import logged_times
from tests.forked_command import MEGARL
from tools.make_dataset import make_dataset

RECIPE = """
name: run
loop: sft
model: {{path: {model}, dtype: float32}}
data: {{train: data/sft.jsonl}}
cluster: {{ranks_per_node: 2, preflight: false}}
trainer: {{max_tokens_per_microbatch: 512}}
optimizer: {{learning_rate: 1e-3}}
train: {{steps: 4, prompts_per_step: 4}}
checkpoint: {{every_steps: 2, asynchronous: false}}
"""
PATIENCE_SECONDS = 300.0
"""Time after which a run hangs. The deadlines under test are shorter by far, but a machine may be busy."""
_ENDING_SECONDS = 20.0
"""Time for a run's processes to end after its driver."""
_ROOT = str(Path(__file__).parents[2])
"""Folder from which a run imports the faults."""


@dataclass(frozen=True)
class End:
    """How a run ended. `seconds`: from the fault, or from the start if none happened. `left`: living processes."""

    exit_code: int
    status: dict[str, Any]
    output: str
    seconds: float
    left: list[int]


@dataclass(frozen=True)
class BrokenRuns:
    """A folder with a recipe for two ranks, and the facts about each end for `tools/check.py faults`."""

    folder: Path
    record: Callable[[str, object], None]

    @property
    def run(self) -> Path:
        return self.folder / "runs/run"

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.run / "checkpoints").glob("*step_*"))

    def train(
        self, *overrides: str, fault: str = "", act: Callable[[subprocess.Popen[str]], None] | None = None
    ) -> End:
        """Train with a fault. `act` is called with the running driver, and may break it from outside."""
        screen = self.folder / "screen"
        search_path = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))
        with screen.open("w") as output:
            driver = subprocess.Popen(
                [*MEGARL, "train", "recipe.yaml", *overrides],
                cwd=self.folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, VARIABLE: fault, "PYTHONPATH": search_path},
                text=True,
            )
        began, processes = time.time(), set[int]()
        try:
            if act is not None:
                act(driver)
                began = time.time()
            while driver.poll() is None:
                processes.update(rank_processes(driver.pid).values())
                assert time.time() - began < PATIENCE_SECONDS, screen.read_text()
                time.sleep(0.05)
            ended = time.time()
        finally:
            driver.kill()
            driver.wait()
        while (left := [pid for pid in processes if is_alive(pid)]) and time.time() - ended < _ENDING_SECONDS:
            time.sleep(0.05)
        path = self.run / "status.json"
        status = json.loads(path.read_text()) if path.exists() else {}
        end = End(driver.returncode, status, screen.read_text(), ended - (self._fault_time(began) or began), left)
        self.record("seconds", round(end.seconds, 2))
        self.record("exit_code", end.exit_code)
        self.record("status", f"{status.get('state')} {status.get('exit_code')}")
        # A run that goes on after its fault has no cause in the end.
        if end.exit_code:
            self.record("cause", str(status.get("cause") or end.output.strip().rpartition("\n")[2])[:160])
        self.record("left", left)
        return end

    def _fault_time(self, began: float) -> float | None:
        """Return the time of the first fault, as its process logged it, or None."""
        logs = [*(self.run / "logs").glob("*/rank_*.log"), self.folder / "screen"]
        times = [logged_times(log.read_text(errors="replace")) for log in logs if log.exists()]
        return min((at for found in times for at in found if at >= began - 1.0), default=None)


@pytest.fixture
def broken_runs(
    tmp_path: Path,
    tiny_model: Callable[..., Path],
    record_property: Callable[[str, object], None],
) -> BrokenRuns:
    make_dataset(tmp_path / "data", sft=16, train=16, heldout=4)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(model=tiny_model()))
    return BrokenRuns(tmp_path, record_property)
