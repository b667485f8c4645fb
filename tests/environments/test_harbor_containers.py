"""Trials of the real Harbor in containers of docker compose and podman-compose. No registry is asked.

HARBOR_PYTHON is the interpreter of a virtual environment with harbor, and with podman-compose for podman.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megarl.processes.process_tree import descendants, kill_tree, send_signal
from tests.child_processes import is_alive
from tests.rewards.pools import wait_until
from tests.sandbox.images import make_image
from tests.sandbox.test_programs_of_containers import docker_daemon, podman_settings

pytestmark = [pytest.mark.harbor, pytest.mark.end_to_end, pytest.mark.timeout(1200)]

PYTHON = os.environ.get("HARBOR_PYTHON", "")
# podman-compose takes images below localhost/ for built ones, and removes them after a trial.
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
        agent = Harbor("tasks", agent="oracle", environment=sys.argv[1], python=sys.argv[2])
        print(await agent.run({"index": int(sys.argv[3]), "record": {}}, "http://127.0.0.1:9/v1", "secret"))
    finally:
        await close_shared()

asyncio.run(main())
"""


@dataclass(frozen=True)
class Engine:
    """docker or podman, and the prefix and environment of programs that use it."""

    name: str
    prefix: Sequence[str]
    environment: Mapping[str, str]
    folder: Path

    def run(self, *arguments: str) -> str:
        command = [*self.prefix, self.name, *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True).stdout

    def start_driver(self, outcome: str) -> subprocess.Popen[str]:
        """Start a program that makes a trial of one task."""
        task = str(sorted(SOLUTIONS).index(outcome))
        command = [*self.prefix, sys.executable, "-c", DRIVER, self.name, PYTHON, task]
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
        command = [*self.prefix, self.name, "exec", *mains, "ls", "/begun"]
        return bool(mains) and subprocess.run(command, env=self.environment, capture_output=True).returncode == 0

    @property
    def num_left(self) -> tuple[int, int, int]:
        """Numbers of containers, of networks and of volumes."""
        listings = ("ps", "--all"), ("network", "ls", "--filter=name=__env"), ("volume", "ls")
        containers, networks, volumes = (len(self.run(*listing, "--quiet").split()) for listing in listings)
        return containers, networks, volumes


@contextmanager
def podman_network(folder: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Settings for podman, and a program that keeps a private network for its bridges."""
    if (command := shutil.which("podman-compose", path=str(Path(PYTHON).parent))) is None:
        pytest.skip(f"needs podman-compose next to {PYTHON}: install it there with pip")
    with (
        podman_settings(folder) as variables,
        subprocess.Popen(["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && cat"], **PIPES) as keeper,
    ):
        assert keeper.stdin is not None and keeper.stdout is not None
        if keeper.stdout.readline() != "up\n":
            pytest.skip("needs root and ip (package iproute2): podman's networks are made in a namespace of their own")
        path = f"{Path(command).parent}:{os.environ['PATH']}"
        yield ["nsenter", f"--net=/proc/{keeper.pid}/ns/net"], {**variables, "PATH": path}


PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}


@contextmanager
def docker_network(folder: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """A daemon of docker with a private network."""
    if subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        pytest.skip(
            "needs Docker Compose 2: package docker-compose of Debian 13, docker-compose-v2 of Ubuntu, or "
            "docker-compose-plugin of Docker"
        )
    with docker_daemon(folder, has_networks=True) as variables:
        yield [], variables


NETWORKS = {"docker": docker_network, "podman": podman_network}


@pytest.fixture(scope="module", params=sorted(NETWORKS))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine with an image and two tasks."""
    name: str = request.param
    if not PYTHON:
        pytest.skip("needs HARBOR_PYTHON: the python of a virtual environment (3.12) with harbor==0.26.0")
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    # Short: a path of a Unix socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="megarl-") as path, NETWORKS[name](Path(path)) as (prefix, variables):
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
        engine = Engine(name, prefix, {**os.environ, **variables, "TMPDIR": str(folder / "tmp")}, folder)
        packed = subprocess.run(["tar", "-c", "-C", folder / "root", "."], capture_output=True, check=True).stdout
        command = [*prefix, name, "import", "-", IMAGE]
        subprocess.run(command, input=packed, env=engine.environment, capture_output=True, check=True)
        yield engine


needs_docker = pytest.mark.parametrize("engine", ["docker"], indirect=True)


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
    num_containers, *others = engine.num_left
    # podman-compose 1.6 ignores errors while it removes networks and volumes.
    assert num_containers == 0 and (engine.name == "podman" or others == [0, 0])


@needs_docker
def test_after_a_kill_of_the_driver_its_trial_stops_its_containers(engine: Engine) -> None:
    with hanging_trial(engine):
        pass
    wait_until(lambda: engine.num_left == (0, 0, 0), seconds=120)
    wait_until(lambda: not [*engine.folder.glob("trials/.live/*")], seconds=120)


@needs_docker
def test_after_a_signal_to_all_processes_a_trial_stops_its_containers(engine: Engine) -> None:
    with hanging_trial(engine) as driver:
        for pid in [driver.pid, *descendants(driver.pid)]:
            send_signal(pid, signal.SIGTERM)
    wait_until(lambda: engine.num_left == (0, 0, 0), seconds=120)
    wait_until(lambda: not [*engine.folder.glob("trials/.live/*")], seconds=120)


@needs_docker
def test_after_a_kill_of_driver_and_trial_the_next_trial_stops_the_containers(engine: Engine) -> None:
    with hanging_trial(engine) as driver:
        started = [driver.pid, *descendants(driver.pid)]
        kill_tree(driver.pid)
        wait_until(lambda: not any(map(is_alive, started[1:])), seconds=60)
    assert engine.num_left == (2, 1, 1)
    assert engine.reward() == 5.0
    assert engine.num_left == (0, 0, 0)
