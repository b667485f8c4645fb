"""The W&B tracker offline: what its files hold, read with W&B's own messages.

Both in processes of their own: W&B's own process and its temporary folders go with the one that imported it.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import math, sys
from megarl.config import Recipe
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.tracker import Tracker

sections = {"name": "small", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"}}
with RunFolder(Recipe.model_validate({**sections, "runs_folder": sys.argv[1]})) as folder:
    folder.begin()
    tracker = Tracker(folder, trackers=["wandb"])
    tracker.log(1, {"reward/mean": 0.5, "train/loss": math.nan})
    tracker.samples(1, [{"prompt": "Two?", "reward": 1.0, "turns": [{"text": "2"}]}, {"prompt": "Three?"}])
    tracker.log(2, {"reward/mean": 0.75})
    tracker.close()
"""
# LevelDB's log format after a header of 7 bytes: blocks of 32 KiB, in them parts with a checksum, a size and a kind.
READ = """
import json, sys
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record

def records(data):
    place, message = 7, b""
    while place < len(data):
        left = (1 << 15) - place % (1 << 15)
        if left < 7:
            place += left
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        message += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last of several
            yield Record.FromString(message)
            message = b""

[file] = Path(sys.argv[1]).glob("wandb/offline-run-*/run-*.wandb")
found = list(records(file.read_bytes()))
run = next(record.run for record in found if record.HasField("run"))
rows = [record.history for record in found if record.HasField("history")]
print(json.dumps({
    "id": run.run_id, "project": run.project, "name": run.display_name,
    "config": {item.key: json.loads(item.value_json) for item in run.config.update},
    "rows": [
        [row.step.num, {item.key or item.nested_key[0]: json.loads(item.value_json) for item in row.item}]
        for row in rows
    ],
}))
"""


def python(folder: Path, code: str, argument: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    settings |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), **environment}
    command = [sys.executable, "-c", code, str(argument)]
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=240)


def test_a_run_is_written_offline(tmp_path: Path) -> None:
    done = python(tmp_path, RUN, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("step 2") and "wandb" not in done.stdout + done.stderr
    read = python(tmp_path, READ, tmp_path / "small")
    found = json.loads(read.stdout or read.stderr)
    assert (found["project"], found["name"], found["config"]["model"]["path"]) == ("megarl", "small", "m")
    assert found["id"] == (tmp_path / "small/wandb/id").read_text().strip()
    assert [(step, row["reward/mean"]) for step, row in found["rows"]] == [(1, 0.5), (2, 0.75)]
    assert math.isnan(float(found["rows"][0][1]["train/loss"]))
    [table] = (tmp_path / "small/wandb").glob("offline-run-*/files/media/table/samples/*.json")
    assert json.loads(table.read_text()) == {
        "columns": ["prompt", "reward", "turns"],
        "data": [["Two?", 1.0, '[{"text": "2"}]'], ["Three?", None, None]],
    }


def test_a_mode_that_is_none_is_refused(tmp_path: Path) -> None:
    done = python(tmp_path, RUN, tmp_path, WANDB_MODE="of-line")
    assert "ConfigError: WANDB_MODE = of-line: W&B has no such mode; set one of online, offline" in done.stderr
