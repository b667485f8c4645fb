"""A run that is killed again and again, and resumed on a full disk, loses nothing and ends with bit-equal weights.

The run's folder is on a small file system in memory, which needs root. Every second kill (SIGKILL, of the driver or of
a rank) comes during a save. After each, the disk is filled: `--resume` must end with 74 and leave every checkpoint, and
metrics and samples up to the newest one, as they were.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.child_processes import rank_processes
from tests.end_to_end.recovery.test_resume import EVERY, RECIPE, REWARD, STEPS, Runs, assert_bit_equal, await_moment
from tools.make_dataset import make_dataset
from tools.make_tiny_model import make_tiny_model

pytestmark = [pytest.mark.end_to_end, pytest.mark.long]

# Nodes with less than a gigabyte left are refused.
DISK = "size=2048m"


@pytest.mark.parametrize("num_kills", [2, pytest.param(10, marks=pytest.mark.timeout(7200))])
@pytest.mark.timeout(1800)
def test_a_killed_run_loses_nothing(small_disk: Callable[[str], Path], num_kills: int) -> None:
    disk, moments = small_disk(DISK), random.Random(1)
    runs = Runs(disk)
    make_dataset(disk / "data", sft=8, train=64, heldout=8)
    (disk / "letters.py").write_text(REWARD)
    model = make_tiny_model(disk / "model", num_layers=2)
    (disk / "recipe.yaml").write_text(RECIPE.format(model=model, steps=STEPS, every=EVERY))
    runs.train("recipe.yaml")
    for number in range(num_kills):
        victim, during_save = moments.choice(["driver", "rank 0", "rank 1"]), number % 2 == 1
        kill(runs, victim, 1 + number * STEPS // num_kills, during_save, moments)
        assert resume_on_full_disk(runs) == (74, []), (number, victim, during_save)
    runs.train("recipe.yaml", "name=killed", "--resume", "cluster.max_restarts=100")
    assert_bit_equal(runs.run("killed"), runs.run("whole"))


def kill(runs: Runs, victim: str, last: int, during_save: bool, moments: random.Random) -> None:
    """Start or resume the run and kill one of its processes once it has logged step `last`."""
    driver = runs.start("recipe.yaml", "name=killed", "--resume", "cluster.max_restarts=100")
    try:
        await_moment(runs, "killed", driver, last, during_save)
        time.sleep(moments.uniform(0, 0.05 if during_save else 1.0))
        # The status is that of the killed attempt until the ranks of this one have started.
        while len(processes := rank_processes(driver.pid) | {-1: driver.pid}) < 3:
            assert driver.poll() is None, driver.communicate()
            time.sleep(0.01)
        os.kill(processes[{"driver": -1, "rank 0": 0, "rank 1": 1}[victim]], signal.SIGKILL)
        driver.communicate(timeout=300)
    finally:
        driver.kill()


def resume_on_full_disk(runs: Runs) -> tuple[int, list[str]]:
    """Resume without free space. Returns the exit code, and the names of files that were changed or removed."""
    before = contents(runs.run("killed"))
    filler = runs.folder / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
    except OSError:
        pass
    driver = runs.start("recipe.yaml", "name=killed", "--resume", "cluster.max_restarts=100")
    output, _ = driver.communicate(timeout=600)
    filler.unlink()
    after = contents(runs.run("killed"))
    if driver.returncode != 74:
        print(output)
    return driver.returncode, [name for name, content in before.items() if after.get(name) != content]


def contents(run: Path) -> dict[str, bytes]:
    """Return what a resume must not lose: checkpoints, recipe, metrics and samples up to the newest checkpoint."""
    checkpoints = sorted((run / "checkpoints").glob("step_*"))
    last = int(checkpoints[-1].name[5:]) if checkpoints else -1
    files = [path for folder in checkpoints for path in folder.rglob("*") if path.is_file()]
    files += [path for path in (run / "samples").glob("step_*.jsonl") if int(path.stem[5:]) <= last]
    by_name = {str(path.relative_to(run)): path.read_bytes() for path in [*files, run / "config.yaml"]}
    for line in (run / "metrics.jsonl").read_bytes().splitlines():
        step = json.loads(line)["step"] if line.endswith(b"}") else last + 1
        if step <= last:
            # An evaluated step has two lines.
            name = f"metrics.jsonl step {step}"
            by_name[name] = by_name.get(name, b"") + line
    return by_name
