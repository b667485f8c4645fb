"""Trials of the real Harbor in containers of docker compose. No registry is asked.

HARBOR_PYTHON is the interpreter of a virtual environment with harbor, and with podman-compose for podman.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from megarl.environments.harbor import Harbor
from megarl.processes.process_tree import descendants, kill_tree, send_signal
from megarl.types import ConfigError
from tests.child_processes import is_alive
from tests.rewards.pools import wait_until
from tests.sandbox.images import make_image
from tests.sandbox.test_programs_of_containers import docker_daemon, podman_settings

pytestmark = [pytest.mark.harbor, pytest.mark.end_to_end, pytest.mark.timeout(1200)]

PYTHON = os.environ.get("HARBOR_PYTHON", "")
IMAGE = "docker.io/library/megarl-harbor:1"
PROGRAMS = ("cat", "chmod", "chown", "cp", "env", "id", "ls", "mkdir", "rm", "sleep", "tar", "touch", "wc")
FILES = {
    "task.toml": 'version = "1.0"\n[agent]\ntimeout_sec = 600\n[verifier]\ntimeout_sec = 600\n',
    "instruction.md": "Write a file.\n",
    "environment/Dockerfile": f"FROM {IMAGE}\nWORKDIR /workspace\n",
    # A second service, a network and a volume of the task's own.
    "environment/docker-compose.yaml": f"""
services:
  main:
    stop_grace_period: 0s
    depends_on: [helper]
    volumes: ["scratch:/scratch"]
  helper:
    image: {IMAGE}
    command: ["sleep", "infinity"]
    stop_grace_period: 0s
volumes:
  scratch:
""",
    "tests/test.sh": "#!/bin/sh\nwc -c < /workspace/answer.txt > /logs/verifier/reward.txt\n",
}
SOLUTIONS = {"answers": "echo four > /workspace/answer.txt", "hangs": "touch /begun; sleep 6000"}
DRIVER = """
import asyncio, sys
from megarl.environments.harbor import Harbor
from megarl.environments.shared import close_shared

async def main():
    try:
        agent = Harbor("tasks", agent="oracle", python=sys.argv[1])
        print(await agent.run({"index": int(sys.argv[2]), "record": {}}, "http://127.0.0.1:9/v1", "secret"))
    finally:
        await close_shared()

asyncio.run(main())
"""


@dataclass(frozen=True)
class Engine:
    """A daemon of docker: the environment of programs that use it, and their working folder."""

    environment: Mapping[str, str]
    folder: Path

    def run(self, *arguments: str) -> str:
        command = ["docker", *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True).stdout

    def start_driver(self, outcome: str) -> subprocess.Popen[str]:
        """Start a program that makes a trial of one task."""
        task = str(sorted(SOLUTIONS).index(outcome))
        command = [sys.executable, "-c", DRIVER, PYTHON, task]
        return subprocess.Popen(command, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, text=True)

    def reward(self) -> float:
        """Make a trial that ends, and return its reward."""
        with self.start_driver("answers") as driver:
            output, _ = driver.communicate()
        assert driver.returncode == 0
        return float(output)

    @property
    def has_begun(self) -> bool:
        """Whether the agent of a hanging trial runs in its container."""
        mains = [name for name in self.run("ps", "--format", "{{.Names}}").split() if "main" in name]
        command = ["docker", "exec", *mains, "ls", "/begun"]
        return bool(mains) and subprocess.run(command, env=self.environment, capture_output=True).returncode == 0

    @property
    def num_left(self) -> tuple[int, int, int]:
        """Numbers of containers, of networks and of volumes."""
        listings = ("ps", "--all"), ("network", "ls", "--filter=name=__env"), ("volume", "ls")
        containers, networks, volumes = (len(self.run(*listing, "--quiet").split()) for listing in listings)
        return containers, networks, volumes


@contextmanager
def docker_network(folder: Path) -> Iterator[dict[str, str]]:
    """A daemon of docker with a private network."""
    if subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        pytest.skip(
            "needs Docker Compose 2: package docker-compose of Debian 13, docker-compose-v2 of Ubuntu, or "
            "docker-compose-plugin of Docker"
        )
    with docker_daemon(folder, has_networks=True) as variables:
        yield variables


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """A docker with an image and two tasks."""
    if not PYTHON:
        pytest.skip("needs HARBOR_PYTHON: the python of a virtual environment (3.12) with harbor==0.26.0")
    if shutil.which("docker") is None:
        pytest.skip("docker is not installed")
    # Short: a path of a Unix socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="megarl-") as path, docker_network(Path(path)) as variables:
        folder = Path(path)
        make_image(folder / "root", PROGRAMS)
        (folder / "root/etc/passwd").write_text("root:x:0:0:root:/:/bin/sh\n")
        (folder / "root/etc/group").write_text("root:x:0:\n")
        for number, outcome in enumerate(sorted(SOLUTIONS)):
            files = {**FILES, "solution/solve.sh": f"#!/bin/sh\n{SOLUTIONS[outcome]}\n"}
            for file, text in files.items():
                place = folder / f"tasks/{number}" / file
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text)
        # A killed trial leaves its temporary files.
        (folder / "tmp").mkdir()
        engine = Engine({**os.environ, **variables, "TMPDIR": str(folder / "tmp")}, folder)
        packed = subprocess.run(["tar", "-c", "-C", folder / "root", "."], capture_output=True, check=True).stdout
        command = ["docker", "import", "-", IMAGE]
        subprocess.run(command, input=packed, env=engine.environment, capture_output=True, check=True)
        yield engine


@contextmanager
def hanging_trial(engine: Engine) -> Iterator[subprocess.Popen[str]]:
    """Start a driver with a trial that never ends. Yields once its agent runs in the container. Kills the driver."""
    with engine.start_driver("hangs") as driver:
        try:
            wait_until(lambda: driver.poll() is not None or engine.has_begun, seconds=300)
            assert driver.poll() is None and engine.num_left == (2, 1, 1)
            yield driver
        finally:
            driver.kill()


def test_a_trial_has_its_reward_and_leaves_nothing(engine: Engine) -> None:
    assert engine.reward() == 5.0
    assert engine.num_left == (0, 0, 0)


def test_after_a_kill_of_the_driver_its_trial_stops_its_containers(engine: Engine) -> None:
    with hanging_trial(engine):
        pass
    wait_until(lambda: engine.num_left == (0, 0, 0), seconds=120)
    wait_until(lambda: not [*engine.folder.glob("trials/.live/*")], seconds=120)


def test_after_a_signal_to_all_processes_a_trial_stops_its_containers(engine: Engine) -> None:
    with hanging_trial(engine) as driver:
        for pid in [driver.pid, *descendants(driver.pid)]:
            send_signal(pid, signal.SIGTERM)
    wait_until(lambda: engine.num_left == (0, 0, 0), seconds=120)
    wait_until(lambda: not [*engine.folder.glob("trials/.live/*")], seconds=120)


def test_after_a_kill_of_driver_and_trial_the_next_trial_stops_the_containers(engine: Engine) -> None:
    with hanging_trial(engine) as driver:
        started = [driver.pid, *descendants(driver.pid)]
        kill_tree(driver.pid)
        wait_until(lambda: not any(map(is_alive, started[1:])), seconds=60)
    assert engine.num_left == (2, 1, 1)
    assert engine.reward() == 5.0
    assert engine.num_left == (0, 0, 0)


@pytest.mark.skipif(not PYTHON or shutil.which("podman") is None, reason="needs HARBOR_PYTHON, and podman")
def test_podman_compose_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves the network of each trial."""
    folder = str(Path(PYTHON).parent)
    if shutil.which("podman-compose", path=folder) is None:
        pytest.skip(f"needs podman-compose next to {PYTHON}: install it there with pip")
    with podman_settings(tmp_path) as variables:
        for name, value in {**variables, "PATH": f"{folder}:{os.environ['PATH']}"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match="podman-compose only"):
            Harbor(str(tmp_path), agent="oracle", environment="podman", python=PYTHON).check()
