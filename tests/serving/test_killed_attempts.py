"""Agents' attempts whose driver is killed: each sampled token is trained once, or accounted for."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl.rollout.journal.state import JournalState, TokenAccount

ROOT = Path(__file__).parents[2]
NUM_ATTEMPTS_A_STEP = 10


def start(folder: Path, steps: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.serving.killed_driver", str(folder), str(steps)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def kill_while_sampling(driver: subprocess.Popen[bytes], journal: Path, num_bytes: int) -> bool:
    """Kill the driver's processes once its journal has grown. Returns False if it ended before."""
    size = None
    while driver.poll() is None:
        if journal.exists():
            now = journal.stat().st_size
            # A start compacts the file, and begins anew.
            size = now if size is None or now < size else size
            if now - size >= num_bytes:
                os.killpg(driver.pid, signal.SIGKILL)
                driver.wait()
                return True
        time.sleep(0.001)
    return False


def read_account(folder: Path) -> TokenAccount:
    state = JournalState(used_from=None)
    state.read(folder / "attempts.journal")
    return state.account()


@pytest.mark.parametrize(
    ("num_attempts", "num_kills"),
    [pytest.param(60, 2, id="small"), pytest.param(500, 100, id="full", marks=pytest.mark.long)],
)
def test_every_sampled_token_is_trained_once_or_accounted_for(
    num_attempts: int, num_kills: int, tmp_path: Path
) -> None:
    steps, draw, kills = num_attempts // NUM_ATTEMPTS_A_STEP, random.Random(7), 0
    for _ in range(num_kills):
        driver = start(tmp_path, steps)
        if not kill_while_sampling(driver, tmp_path / "attempts.journal", draw.randrange(1, 60_000)):
            break
        kills += 1
        account = read_account(tmp_path)
        assert account.faults == []
    driver = start(tmp_path, steps)
    _, errors = driver.communicate(timeout=900)
    assert driver.returncode == 0, errors.decode()[-3000:]
    assert kills > 0
    account = read_account(tmp_path)
    assert account.faults == [] and account.waiting == 0 and account.lost > 0
    assert account.sampled == account.num_trained + account.num_untrained + account.lost
    trained = json.loads((tmp_path / str(steps) / "trained.json").read_text())
    sampled = dict(line.split() for line in (tmp_path / "sampled").read_text().splitlines())
    names = [name for _, name, _ in trained]
    assert len(set(names)) == len(names) and set(names) <= set(sampled)
    assert account.num_trained == sum(count for _, _, count in trained)
    by_step = {step: sum(count for s, _, count in trained if s == step) for step, _, _ in trained}
    assert {step: count for step, count in account.trained.items() if count} == by_step
    # What a kill cut off before its record was never read by an agent.
    assert account.sampled <= sum(map(int, sampled.values()))
