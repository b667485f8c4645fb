"""Attempts with killed containers, agents of nodes, endpoints and drivers: a token is trained once or accounted for.

A program goes on after a driver that was killed, if the next one comes within its lease.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from megarl.rollout.journal.state import JournalState
from megarl.rollout.journal.token_account import TokenAccount
from tests.rewards.pools import wait_until
from tests.serving.agents.killed_driver import OUTLIVE_SECONDS

ROOT = Path(__file__).parents[3]
NUM_ATTEMPTS_A_STEP = 10
KINDS = ("container", "agent", "endpoint", "driver")
KEEPER = "megarl.sandbox.containers.keeper"


@pytest.fixture
def drivers() -> Iterator[subprocess.Popen[bytes]]:
    """The process that forks drivers (`killed_driver.start_drivers`)."""
    forking = subprocess.Popen(
        [sys.executable, "-m", "tests.serving.agents.killed_driver"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    )
    with forking:
        yield forking
        with suppress(ProcessLookupError):
            os.killpg(forking.pid, signal.SIGKILL)


class Driver:
    """A driver that tests kill, and the processes that belong to it."""

    def __init__(self, drivers: subprocess.Popen[bytes], folder: Path, steps: int, port: int) -> None:
        assert drivers.stdin is not None and drivers.stdout is not None
        self.folder, self._output = folder, drivers.stdout
        self.exit_code: int | None = None
        (folder / "ready").unlink(missing_ok=True)
        drivers.stdin.write(json.dumps([str(folder), steps, port]).encode() + b"\n")
        self.pid = self._read_number()

    def wait_until_ready(self) -> bool:
        """Wait until it can be signalled. Returns False if it has ended."""
        wait_until(lambda: self.has_ended or (self.folder / "ready").exists(), seconds=300)
        return not self.has_ended

    def _read_number(self) -> int:
        return int(self._output.readline())

    @property
    def has_ended(self) -> bool:
        if self.exit_code is None and select.select([self._output], [], [], 0)[0]:
            self.exit_code = self._read_number()
        return self.exit_code is not None

    def wait_for_growth(self, num_bytes: int) -> bool:
        """Wait until its journal has grown. Returns False if it ended before."""
        journal, size = self.folder / "attempts.journal", None
        while not self.has_ended:
            if journal.exists():
                now = journal.stat().st_size
                # A start compacts the file, and begins anew.
                size = now if size is None or now < size else size
                if now - size >= num_bytes:
                    return True
            time.sleep(0.005)
        return False

    def kill(self, kind: str, draw: random.Random) -> bool:
        """Kill a part of the run. Returns whether there was one."""
        if kind == "endpoint":
            os.kill(self.pid, signal.SIGUSR1)
        elif kind == "driver":
            # The driver alone: what it leaves must end by itself, or go on.
            os.kill(self.pid, signal.SIGKILL)
            wait_until(lambda: self.has_ended, seconds=60)
        else:
            choices = json.loads((self.folder / "agents").read_text()) if kind == "agent" else []
            choices = choices or [pid for pid, command in processes_of(self.folder) if KEEPER in command]
            if not choices:
                return False
            try:
                os.kill(draw.choice(choices), signal.SIGKILL)
            except ProcessLookupError:
                return False
        return True


def processes_of(folder: Path) -> list[tuple[int, str]]:
    """Return the processes whose command names the folder, with their commands."""
    processes = []
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            command = (path / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(folder) in command:
            processes.append((int(path.name), command))
    return processes


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def read_account(folder: Path) -> TokenAccount:
    state = JournalState(used_from=None)
    state.read(folder / "attempts.journal")
    return state.account()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("num_attempts", "num_rounds"),
    [
        pytest.param(30, 2, id="small"),
        pytest.param(500, 25, id="full", marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
    ],
)
def test_every_sampled_token_is_trained_once_or_accounted_for(
    num_attempts: int, num_rounds: int, drivers: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """Each round kills one part of each kind, the driver last: 20 % of the attempts in all."""
    steps, draw, kills, port = num_attempts // NUM_ATTEMPTS_A_STEP, random.Random(7), Counter[str](), free_port()
    began = time.monotonic()
    for _ in range(num_rounds):
        driver = Driver(drivers, tmp_path, steps, port)
        if not driver.wait_until_ready():
            break
        for kind in KINDS:
            # An attempt takes about 5,000 bytes.
            if driver.wait_for_growth(draw.randrange(1, 4_000 * num_attempts // (num_rounds * len(KINDS)))):
                kills[kind] += driver.kill(kind, draw)
        if not driver.has_ended:
            driver.kill("driver", draw)
        assert read_account(tmp_path).faults == []
    driver = Driver(drivers, tmp_path, steps, port)
    wait_until(lambda: driver.has_ended, seconds=1800)
    assert driver.exit_code == 0
    assert kills["driver"] > 0 and kills["endpoint"] > 0
    account = read_account(tmp_path)
    assert account.faults == [] and account.waiting == 0
    assert account.sampled == account.num_trained + account.num_untrained + account.lost
    trained = json.loads((tmp_path / str(steps) / "trained.json").read_text())
    sampled = dict(line.split() for line in (tmp_path / "sampled").read_text().splitlines())
    names = [name for _, name, _ in trained]
    assert len(set(names)) == len(names) and set(names) <= set(sampled)
    assert account.num_trained == sum(count for _, _, count in trained)
    by_step = {step: sum(count for s, _, count in trained if s == step) for step, _, _ in trained}
    assert {step: count for step, count in account.trained.items() if count} == by_step
    num_aborted = sum(int(number) for name, number in sampled.items() if name.startswith("aborted-"))
    # The kills of a small run may meet no call in an engine.
    if num_rounds > 2:
        assert num_aborted > 0 and account.num_untrained + account.lost > 0
    # What a kill cut off before its record was never read by an agent.
    assert account.sampled <= sum(map(int, sampled.values()))
    attempts = [json.loads(line) for line in (tmp_path / "attempts").read_text().splitlines()]
    assert sum(attempt["outlived"] for attempt in attempts) > 0
    # Containers of a lost agent, and those that no driver took over, end with their lease.
    wait_until(lambda: not processes_of(tmp_path), seconds=2 * OUTLIVE_SECONDS)
    with socket.create_server(("127.0.0.1", port)):
        pass
    print(
        f"\n{num_attempts} attempts, {time.monotonic() - began:.0f} s, kills {dict(kills)}: "
        f"sampled {account.sampled} = trained {account.num_trained} + untrained {account.num_untrained} + lost "
        f"{account.lost}, of these {num_aborted} in aborted calls; "
        f"{len(attempts)} ended, {sum(a['outlived'] for a in attempts):.0f} went on after a driver, "
        f"{sum(a['restarts'] for a in attempts)} began again, failures "
        f"{Counter(str(a['failure']).partition(':')[0] for a in attempts)}"
    )
