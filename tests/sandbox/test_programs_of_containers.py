"""Containers of the real podman and docker, from an image of this machine's programs. No registry is asked."""

from __future__ import annotations

import asyncio
import base64
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megarl.processes.process_tree import descendants
from megarl.sandbox.containers.container import Container, ContainerError, ContainerSettings, find_start_fault
from megarl.sandbox.containers.requests import Limits
from tests.child_processes import is_alive
from tests.rewards.pools import wait_until
from tests.sandbox.images import make_image
from tests.sandbox.test_containers import endpoint

__all__ = ["endpoint"]

IMAGE = "localhost/megarl-test:1"
PROGRAMS = ("base64", "cat", "chmod", "head", "ls", "mkdir", "rm", "sleep", "tail", "tar", "yes")
LIMITS = Limits(processes=40, memory_bytes=200 << 20, output_bytes=100_000)
VARIABLES = {"PATH": "/bin"}
# The container must not need more than this process may have: in a container of its own, it may lack CAP_SYS_RESOURCE.
PODMAN_SETTINGS = """
[containers]
default_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]
[engine]
{runtime}
"""
STORAGE_SETTINGS = """
[storage]
driver = "vfs"
graphroot = "{folder}/images"
runroot = "{folder}/running"
"""


def run(program: str, *arguments: str) -> str:
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout


@contextmanager
def podman_settings(folder: Path) -> Iterator[dict[str, str]]:
    """Settings and images of its own for podman, as environment variables."""
    # crun refuses machines that mount both versions of cgroups.
    runtime = 'runtime = "runc"' if shutil.which("runc") else ""
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    limits = {"files": resource.getrlimit(resource.RLIMIT_NOFILE)[1], "processes": min(processes, 4096)}
    (folder / "containers.conf").write_text(PODMAN_SETTINGS.format(runtime=runtime, **limits))
    (folder / "storage.conf").write_text(STORAGE_SETTINGS.format(folder=folder))
    yield {
        "CONTAINERS_CONF": str(folder / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
    }


@contextmanager
def docker_daemon(folder: Path, *, has_networks: bool = False) -> Iterator[dict[str, str]]:
    """A daemon of docker of its own with its files in `folder`, as environment variables.

    `has_networks`: containers may have networks, in a network namespace of the daemon.
    """
    if shutil.which("dockerd") is None or os.geteuid() != 0:
        pytest.skip("needs root and dockerd: apt-get install --no-install-recommends docker.io")
    places = ("--data-root", folder / "data", "--exec-root", folder / "exec", "--pidfile", folder / "pid")
    command = ["dockerd", "--iptables=false", "--storage-driver=vfs", *places]
    if has_networks:
        command = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]
    else:
        command.append("--bridge=none")
    host = f"unix://{folder}/socket"
    with (folder / "log").open("w") as log, subprocess.Popen([*command, "-H", host], stdout=log, stderr=log) as daemon:
        try:
            asking = ["docker", "--host", host, "version"]
            wait_until(
                lambda: daemon.poll() is not None or subprocess.run(asking, capture_output=True).returncode == 0,
                seconds=120,
            )
            if daemon.poll() is not None:
                pytest.skip(f"dockerd does not run on this machine: {(folder / 'log').read_text()[-400:]}")
            yield {"DOCKER_HOST": host}
        finally:
            daemon.terminate()


@pytest.fixture(scope="module", params=["podman", "docker"])
def program(request: pytest.FixtureRequest) -> Iterator[str]:
    """podman or docker, with an image."""
    name: str = request.param
    if shutil.which(name) is None:
        package = {"podman": "podman", "docker": "docker.io"}[name]
        pytest.skip(f"{name} is not installed: apt-get install --no-install-recommends {package}")
    start = {"podman": podman_settings, "docker": docker_daemon}[name]
    # Short: a path of a Unix socket has at most 107 bytes.
    with (
        tempfile.TemporaryDirectory(prefix="megarl-") as folder,
        start(Path(folder)) as variables,
        pytest.MonkeyPatch.context() as patch,
    ):
        for variable, value in variables.items():
            patch.setenv(variable, value)
        root = Path(folder, "root")
        make_image(root, PROGRAMS)
        packed = subprocess.run(["tar", "-c", "-C", root, "."], capture_output=True, check=True).stdout
        subprocess.run([name, "import", "-", IMAGE], input=packed, capture_output=True, check=True)
        yield name
        left = containers_left(name)
        # A container of a failed test would keep its mounts in the tests' folder.
        if left:
            run(name, "rm", "--force", *left)
        run(name, "rmi", "--force", IMAGE)
        assert not left


def containers_left(program: str) -> list[str]:
    """Ids of all containers. docker removes one a moment after its end."""
    left = run(program, "ps", "--all", "--quiet").split()
    deadline = time.monotonic() + 30
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = run(program, "ps", "--all", "--quiet").split()
    return left


@pytest.fixture
def settings(program: str, endpoint: tuple[str, int]) -> ContainerSettings:
    return ContainerSettings(kind=program, name="megarl-test", address=endpoint, image=IMAGE, limits=LIMITS)


async def use_endpoint_and_files(settings: ContainerSettings) -> None:
    """Run programs in a container: the endpoint answers, other addresses do not, files stay, and processes end."""
    host, port = settings.address
    reaching = "exec 3<>/dev/tcp/127.0.0.1/11811 && echo this >&3 && cat <&3"
    refused = (
        f"(exec 3<>/dev/tcp/{host}/{port}) && echo REACHED; (exec 3<>/dev/tcp/192.0.2.1/80) && echo REACHED; exit 4"
    )
    container = Container(settings)
    await container.start()
    stdin = base64.b64encode(b"hello ").decode()
    ran = await container.execute(["sh", "-c", f"cat; {reaching}; sleep 600 &"], VARIABLES, stdin=stdin)
    assert (ran.exit_code, ran.stdout) == (0, "hello got this\n"), ran
    ran = await container.execute(["sh", "-c", refused], VARIABLES)
    assert ran.exit_code == 4 and "REACHED" not in ran.stdout and "Connection refused" in ran.stderr, ran
    # Files of one program are there for the next, and its processes are not.
    ran = await container.execute(["sh", "-c", "echo first > /file; sleep 600 & sleep 600 &"], VARIABLES)
    assert ran.exit_code == 0, ran
    listing = 'cat /file; for place in /proc/[0-9]*; do cat "$place/comm" 2>/dev/null; done'
    ran = await container.execute(["sh", "-c", listing], VARIABLES)
    assert ran.stdout.startswith("first\n") and "sleep" not in ran.stdout, ran
    script = base64.b64encode(b"#!/bin/sh\necho 0.5 > /logs/reward.txt").decode()
    await container.put("/tests", {"test.sh": (0o755, script)})
    assert (await container.execute(["sh", "-c", "mkdir /logs && /tests/test.sh"], VARIABLES)).exit_code == 0
    assert base64.b64decode(await container.get("/logs/reward.txt", 100)) == b"0.5\n"
    with pytest.raises(ContainerError):
        await container.get("/absent", 100)
    await container.stop()


def test_a_program_reaches_the_endpoint_alone_and_keeps_its_files(settings: ContainerSettings) -> None:
    asyncio.run(use_endpoint_and_files(settings))
    assert not containers_left(settings.kind)


async def test_limits_hold_and_a_cancelled_program_ends(settings: ContainerSettings) -> None:
    container = Container(settings)
    await container.start()
    ran = await container.execute(["yes"], VARIABLES)
    assert ran.outcome.startswith("OutputLimit: "), ran
    forks = "for n in {1..60}; do sleep 600 & done; echo ended"
    ran = await container.execute(["bash", "-c", forks], VARIABLES)
    assert "Resource temporarily unavailable" in ran.stderr, ran
    # `tail` holds a line without end in memory.
    ran = await container.execute(["bash", "-c", "head -c 500000000 /dev/zero | tail > /dev/null"], VARIABLES)
    assert ran.exit_code == 137 and not os.path.exists("oom"), ran
    running = asyncio.create_task(container.execute(["sleep", "600"], VARIABLES))
    await asyncio.sleep(1.0)
    running.cancel()
    await asyncio.wait({running})
    # The container lives on.
    assert (await container.execute(["sh", "-c", "echo on"], VARIABLES)).stdout == "on\n"
    await container.stop()


def test_an_image_that_does_not_exist_is_a_fault(settings: ContainerSettings) -> None:
    assert find_start_fault(settings) is None
    absent = ContainerSettings(
        kind=settings.kind, name="megarl-absent", address=settings.address, image="localhost/absent:1"
    )
    fault = find_start_fault(absent)
    assert fault is not None and "absent" in fault


HOLDER = """
import asyncio, sys
from megarl.sandbox.containers.container import Container, ContainerSettings
async def hold():
    settings = {"kind": sys.argv[2], "name": "megarl-held", "address": ("127.0.0.1", 9), "image": sys.argv[1]}
    container = Container(ContainerSettings(**settings))
    await container.start()
    print("held", flush=True)
    await container.execute(["sh", "-c", "sleep 600 & sleep 600"], {"PATH": "/bin"})
asyncio.run(hold())
"""


def test_nothing_runs_after_a_killed_holder_and_the_next_start_removes_its_entry(settings: ContainerSettings) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, IMAGE, settings.kind], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        first = int(run(settings.kind, "inspect", "--format", "{{.State.Pid}}", "megarl-held"))
        wait_until(lambda: "sleep" in run(settings.kind, "top", "megarl-held"), seconds=60)
        started = [first, *descendants(holder.pid), *descendants(first)]
        os.kill(holder.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, started)), seconds=60)
    # Removal at the next start of any container.
    assert find_start_fault(settings) is None
    assert not containers_left(settings.kind)
