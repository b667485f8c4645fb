"""Containers of agent programs: what they can reach, the limits that end them, their lease, and what is left."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megarl.processes.process_tree import descendants
from megarl.sandbox.containers.container import Container, ContainerError, ContainerSettings, Executed
from megarl.sandbox.containers.host import ContainerHost
from megarl.sandbox.containers.outliving import connect_to_container
from megarl.sandbox.containers.relay import Relay
from megarl.sandbox.containers.requests import Limits
from tests.child_processes import is_alive
from tests.rewards.pools import wait_until
from tests.sandbox.images import make_image

LIMITS = Limits(processes=40, memory_bytes=200 << 20, disk_bytes=20 << 20, output_bytes=100_000)
VARIABLES = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
KINDS = ("process", "sandbox")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[tuple[str, int]]:
    """Address of a server that sends back what it reads."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                with client:
                    client.sendall(b"got " + client.recv(100))

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()


def execute(*command: str, settings: ContainerSettings, **fields: Any) -> Executed:
    """Run one program in a container of its own."""

    async def drive() -> Executed:
        container = Container(settings)
        await container.start()
        try:
            return await container.execute(list(command), VARIABLES, **fields)
        finally:
            await container.stop()

    return asyncio.run(drive())


@pytest.fixture
def settings(endpoint: tuple[str, int]) -> Callable[..., ContainerSettings]:
    return lambda kind, **fields: ContainerSettings(
        **({"kind": kind, "name": "a", "address": endpoint, "limits": LIMITS} | fields)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_gets_its_input_and_its_output_is_read(kind: str, settings: Callable[..., ContainerSettings]) -> None:
    stdin = base64.b64encode(b"hello").decode()
    ran = execute("sh", "-c", "cat; echo no >&2; sleep 600 & exit 3", settings=settings(kind), stdin=stdin)
    assert ran == Executed(exit_code=3, stdout="hello", stderr="no\n", outcome="", refused="")
    assert execute("/no/such", settings=settings(kind)).refused == "No such file or directory"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ("while true; do sleep 600 & done", "ProcessLimit"),
        ("yes", "OutputLimit"),
        (
            "exec python3 -c 'x = bytearray(1 << 29); x[::4096] = b\"1\" * (1 << 17); input()' < /dev/zero",
            "MemoryLimit",
        ),
        ("setsid sh -c 'sleep 600' & setsid yes > /dev/null & kill -STOP $$", "Cancelled"),
    ],
    ids=["forks", "floods", "memory", "never ends"],
)
async def test_a_program_beyond_a_limit_ends_by_name_and_leaves_nothing(
    script: str, outcome: str, kind: str, settings: Callable[..., ContainerSettings]
) -> None:
    container = Container(settings(kind))
    await container.start()
    keeper = list(descendants(os.getpid()))
    running = asyncio.create_task(container.execute(["sh", "-c", script], VARIABLES))
    if outcome == "Cancelled":
        await asyncio.sleep(0.5)
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()
        # The container lives on, without the program.
        ran = await container.execute(["echo", "on"], VARIABLES)
        assert ran.stdout == "on\n"
    else:
        ran = await running
        assert ran.outcome.startswith(f"{outcome}: ")
        # A shell that cannot fork ends by itself, perhaps before it is found.
        assert ran.exit_code is None or (outcome == "ProcessLimit" and ran.exit_code == 2)
    assert set(descendants(os.getpid())) <= set(keeper)
    await container.stop()
    return ran


def test_a_full_disk_ends_the_program(settings: Callable[..., ContainerSettings]) -> None:
    ran = execute("sh", "-c", "cat /dev/zero > /tmp/full; sleep 600", settings=settings("sandbox"))
    assert ran.outcome.startswith("DiskLimit: ")


ESCAPES = """
import os, socket
def attempt(name, work):
    try:
        work()
    except OSError as error:
        print(name, "failed", error.errno, flush=True)
    else:
        print(name, "SUCCEEDED", flush=True)
attempt("network", lambda: socket.create_connection(("192.0.2.1", 80), 5))
attempt("machine's loopback", lambda: socket.create_connection(("127.0.0.1", {port}), 5))
attempt("home", lambda: os.listdir({home!r}))
attempt("shadow", lambda: open("/etc/shadow").read())
attempt("system", lambda: open("/usr/written", "w"))
attempt("core pattern", lambda: open("/proc/sys/kernel/core_pattern", "w").write("x"))
attempt("sysrq", lambda: open("/proc/sysrq-trigger", "w").write("h"))
attempt("device", lambda: os.mknod("/tmp/sda", 0o60600, os.makedev(8, 0)))
attempt("first process", lambda: open("/proc/1/environ").read() or 1 / 0)
attempt("first process's root", lambda: os.listdir("/proc/1/root"))
attempt("kernel log", lambda: open("/dev/kmsg").read(1))
os.system("unshare -Ur true; mount -t tmpfs x /mnt; kill -9 1; kill -STOP 1; nsenter -t 1 -m true")
attempt("ids", lambda: os.setuid(1000))
print(sorted(int(name) for name in os.listdir("/proc") if name.isdigit()) == [1, os.getpid()])
client = socket.create_connection(("127.0.0.1", 11811))
client.sendall(b"this")
print(client.recv(100).decode())
"""


def test_a_program_of_the_sandbox_reaches_the_endpoint_and_nothing_else(
    settings: Callable[..., ContainerSettings], endpoint: tuple[str, int]
) -> None:
    script = ESCAPES.format(port=endpoint[1], home=str(Path(__file__).parents[1]))
    ran = execute(sys.executable, "-c", script, settings=settings("sandbox"))
    lines = ran.stdout.splitlines()
    assert not [line for line in lines if "SUCCEEDED" in line], ran
    assert len(lines) == 14 and lines[-2:] == ["True", "got this"], ran
    assert not Path("/usr/written").exists()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a shell and a few programs."""
    folder = tmp_path_factory.mktemp("image")
    make_image(folder, ("cat", "ls", "mkdir", "rm"))
    (folder / "app").mkdir()
    (folder / "app/code.py").write_text("x = 1\n")
    return folder


def test_a_program_changes_its_layer_of_an_image_and_not_the_image(
    settings: Callable[..., ContainerSettings], image: Path, tmp_path: Path
) -> None:
    # Of a folder that only its owner can read, also where root starts the container.
    tmp_path.chmod(0o700)
    (tmp_path / "shown").write_text("shown\n")
    script = f"cat {tmp_path}/shown; echo y = 2 >> /app/code.py; cat /app/code.py; rm -r /app; mkdir /app/; ls /app"
    script += f"; ls /home /root /work; echo z > {tmp_path}/shown"
    ran = execute("sh", "-c", script, settings=settings("sandbox", image=str(image), folders=(str(tmp_path),)))
    assert ran.stdout == "shown\nx = 1\ny = 2\n/home:\nagent\n", ran
    assert "Read-only file system" in ran.stderr and (tmp_path / "shown").read_text() == "shown\n"
    assert (image / "app/code.py").read_text() == "x = 1\n" and not (image / "workspace").exists()


async def test_files_enter_and_leave_whatever_a_program_left_there(settings: Callable[..., ContainerSettings]) -> None:
    container = Container(settings("sandbox"))
    await container.start()
    script = base64.b64encode(b"#!/bin/sh\necho ran; mkdir -p /logs; printf 0.5 > /logs/reward.txt").decode()
    left = "mkdir /away; ln -s /away /tests; mkfifo /pipe; ln -s /dev/zero /zero; head -c 200 /dev/zero > /long"
    assert (await container.execute(["sh", "-c", left], {})).exit_code == 0
    await container.put("/tests", {"sub/test.sh": (0o755, script)})
    ran = await container.execute(["/tests/sub/test.sh"], {})
    assert ran.stdout == "ran\n"
    assert base64.b64decode(await container.get("/logs/reward.txt", 100)) == b"0.5"
    assert (await container.execute(["ls", "/away"], {})).stdout == ""
    for path in ("/pipe", "/zero", "/long", "/absent", "/tests"):
        with pytest.raises(ContainerError):
            await container.get(path, 100)
    await container.stop()
    with pytest.raises(ContainerError, match="ContainerLost"):
        await container.get("/logs/reward.txt", 100)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_container_ends_without_its_lease_and_lives_with_it(
    kind: str, settings: Callable[..., ContainerSettings]
) -> None:
    before = set(descendants(os.getpid()))
    container = Container(settings(kind, lease_seconds=2.0))
    await container.start()
    running = asyncio.create_task(container.execute(["sleep", "600"], VARIABLES))
    for _ in range(8):
        await asyncio.sleep(0.5)
        container.renew()
    assert not running.done()
    with pytest.raises(ContainerError, match="ContainerLost"):
        await asyncio.wait_for(running, 60)
    await container.stop()
    assert set(descendants(os.getpid())) <= before


HOLDER = """
import asyncio, sys
from megarl.sandbox.containers.container import Container, ContainerSettings
async def hold():
    container = Container(ContainerSettings(kind=sys.argv[1], name="a", address=("127.0.0.1", 9), lease_seconds=3.0))
    await container.start()
    print("held", flush=True)
    await container.execute(["sh", "-c", "sleep 600 & setsid sleep 600 & sleep 600"], {"PATH": "/usr/bin:/bin"})
asyncio.run(hold())
"""


def count_mounts() -> Counter[str]:
    """Return how many mounts this mount namespace has at each place where a container of megarl mounts something.

    Other places do not count: tests in other workers mount small disks, and so does their podman or docker.
    """
    places = ("/", "/sys", "/sys/root", "/sys/image", "/proc", "/dev", "/dev/pts", "/dev/shm")
    # The fifth field of a line of mountinfo is the mount point (proc_pid_mountinfo(5)).
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return Counter(point for point in points if point in places)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_nothing_is_left_of_a_holder_that_is_killed_or_stopped(kind: str, number: signal.Signals) -> None:
    mounts = count_mounts()
    with subprocess.Popen([sys.executable, "-c", HOLDER, kind], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        wait_until(lambda: len(list(descendants(holder.pid))) >= 5, seconds=60)
        started = list(descendants(holder.pid))
        began = time.monotonic()
        os.kill(holder.pid, number)
        # The holder's supervisor may become its zombie, as a stopped process reaps nothing.
        wait_until(lambda: sum(map(is_alive, started)) == 0, seconds=60)
        if number == signal.SIGSTOP:
            assert time.monotonic() - began > 1.5, "it lived as long as its lease"
            os.kill(holder.pid, signal.SIGKILL)
    assert count_mounts() == mounts


def commands() -> Iterator[str]:
    """Yield the commands of all processes."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes().decode(errors="replace")
        except OSError:
            continue


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_host_goes_on_with_a_container(
    kind: str, settings: Callable[..., ContainerSettings], tmp_path: Path
) -> None:
    """The first host ends while a program runs, the second one while another program does."""
    name = f"megarl-test-{tmp_path.name}-{os.getpid()}"

    def is_left() -> bool:
        return any(name in command for command in commands())

    async def drive() -> None:
        of_container = settings(kind, name=name, outlives_host=True, lease_seconds=30.0)
        with pytest.raises(ContainerError, match="ContainerLost"):
            await Container(of_container).adopt()
        first = Container(of_container)
        await first.start()
        slow = ["sh", "-c", "echo begun; sleep 2; echo done"]
        running = asyncio.create_task(first.execute(slow, VARIABLES, label="agent"))
        await asyncio.sleep(0.5)
        await first.disconnect()
        with pytest.raises(ContainerError, match="ContainerLost"):
            await running
        second = Container(of_container)
        await second.adopt()
        assert second.running_label == "agent" and 0 < second.seconds_running < 30 and second.url == first.url
        ran = await second.join("agent")
        assert (ran.stdout, ran.exit_code, ran.outcome) == ("begun\ndone\n", 0, "")
        with pytest.raises(ContainerError, match="ContainerLost: the container has no such program"):
            await second.join("other")
        verifying = asyncio.create_task(second.execute(["sleep", "600"], VARIABLES))
        await asyncio.sleep(0.5)
        await second.disconnect()
        await asyncio.wait({verifying})
        assert isinstance(verifying.exception(), ContainerError)
        third = Container(of_container)
        await third.adopt()
        # The verifier that still runs has no label.
        assert (third.running_label, third.seconds_running) == ("", 0.0)
        # The end of the agent is still known, and the program that ran is killed.
        assert await third.join("agent") == ran
        assert is_left()
        await third.stop()
        assert not is_left()
        # Nobody comes back to this one.
        lost = Container(settings(kind, name=name, outlives_host=True, lease_seconds=1.0))
        await lost.start()
        await lost.disconnect()
        # Who only looks for it does not renew the lease.
        while is_left():
            with suppress(OSError):
                connect_to_container(name).close()
            await asyncio.sleep(0.1)

    asyncio.run(asyncio.wait_for(drive(), 120))


@pytest.mark.parametrize("outlives_host", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_ends_a_container_that_is_starting(
    kind: str, outlives_host: bool, settings: Callable[..., ContainerSettings], tmp_path: Path
) -> None:
    """The agent of a node does not see that the driver cancelled the start."""
    name = f"megarl-test-{tmp_path.name}-{os.getpid()}"

    async def drive() -> None:
        host = ContainerHost()
        of_container = asdict(settings(kind, name=name, outlives_host=outlives_host))
        starting = asyncio.create_task(host.request("start", {"settings": of_container}))
        await asyncio.sleep(0)
        # Its command shows shortly after its start. The event loop stands still meanwhile, so the start is under way.
        while not any(name in command for command in commands()):
            time.sleep(0.001)
        await host.request("stop", {"name": name})
        assert starting.cancelled()
        # The kernel kills a keeper after its supervisor.
        while any(name in command for command in commands()):
            await asyncio.sleep(0.05)
        assert (await host.request("renew", {}))["names"] == []

    asyncio.run(asyncio.wait_for(drive(), 120))


def test_a_connection_waits_for_an_endpoint_that_is_away() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = probe.getsockname()
    with socket.create_server(("127.0.0.1", 0)) as entrance:
        Relay(entrance.dup(), address, 30.0)
        with socket.create_connection(entrance.getsockname()) as client:
            client.sendall(b"x")
            client.settimeout(0.5)
            with pytest.raises(TimeoutError):
                client.recv(1)
            with socket.create_server(address) as server:
                connection, _ = server.accept()
                with connection:
                    connection.sendall(b"got " + connection.recv(1))
                client.settimeout(30)
                assert client.recv(10) == b"got x"
