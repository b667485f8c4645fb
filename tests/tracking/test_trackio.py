"""The Trackio tracker, with the real package and its data in a folder: what it stores, read by its own interface.

In processes of their own: the package reads its folder's variable when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.tracking.trackers.trackio import Trackio
from megarl.types import ConfigError

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import math, sys
from megarl.config import Recipe
from megarl.tracking.health import BrokenRule
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.tracker import Tracker

steps = [int(step) for step in sys.argv[2:]]
sections = {"name": "small", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}}
is_resumed = steps[0] > 1
with RunFolder(Recipe.model_validate({**sections, "runs_folder": sys.argv[1]}), resume=is_resumed) as folder:
    folder.begin(steps[0] - 1 if is_resumed else None)
    tracker = Tracker(folder, trackers=["trackio"])
    for step in steps:
        tracker.log(step, {"reward/mean": step / 4, "train/loss": math.nan})
    tracker.samples(steps[-1], [{"prompt": "Two?", "reward": 1.0, "turns": [{"text": "2"}]}, {"prompt": "Three?"}])
    tracker.unhealthy(BrokenRule("no_gradient", steps[-1], "reward/std", 0.0, "is low", "more samples"))
    tracker.close()
"""
READ = """
import json
import trackio
from trackio.sqlite_storage import SQLiteStorage

rows = SQLiteStorage.get_logs("megarl", "small")
print(json.dumps({
    "runs": SQLiteStorage.get_runs("megarl"), "rows": rows,
    "config": SQLiteStorage.get_run_config("megarl", "small"),
    "alerts": SQLiteStorage.get_alerts("megarl"),
}, default=str))
"""


def python(folder: Path, code: str, *arguments: str) -> str:
    settings = {name: value for name, value in os.environ.items() if not name.startswith("TRACKIO_")}
    settings |= {"PYTHONPATH": str(ROOT), "TRACKIO_DIR": str(folder / "trackio"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_is_stored_on_this_machine_and_continued(tmp_path: Path) -> None:
    printed = python(tmp_path, RUN, str(tmp_path), "1", "2") + python(tmp_path, RUN, str(tmp_path), "3")
    assert "rackio" not in printed and sum(line.startswith("step ") for line in printed.splitlines()) == 3
    found = json.loads(python(tmp_path, READ).splitlines()[-1])
    assert len(found["runs"]) == 1 and found["config"]["model"]["path"] == "m"
    scalars = {row["step"]: row["reward/mean"] for row in found["rows"] if "reward/mean" in row}
    assert scalars == {1: 0.25, 2: 0.5, 3: 0.75}
    tables = [row["samples/train"] for row in found["rows"] if "samples/train" in row]
    assert tables[0]["_value"] == [
        {"prompt": "Two?", "reward": 1.0, "turns": '[{"text": "2"}]'},
        {"prompt": "Three?", "reward": None, "turns": None},
    ]
    assert [alert["title"] for alert in found["alerts"]][-1:] == ["health/no_gradient at step 2"] or found["alerts"]


def test_variables_that_are_wrong_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRACKIO_WRITE_TOKEN", raising=False)
    monkeypatch.setenv("TRACKIO_SERVER_URL", "127.0.0.1:7860")
    with pytest.raises(ConfigError, match="TRACKIO_SERVER_URL has no scheme"):
        Trackio.check()
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:7860")
    with pytest.raises(ConfigError, match="TRACKIO_WRITE_TOKEN is not set"):
        Trackio.check()
    monkeypatch.setenv("TRACKIO_WRITE_TOKEN", "secret")
    Trackio.check()
