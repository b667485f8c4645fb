"""Containers of the real apptainer, from a folder of this machine's programs."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.processes.process_tree import descendants
from megarl.sandbox.containers.container import Container, ContainerSettings, find_start_fault
from tests.child_processes import is_alive, process_name
from tests.rewards.pools import wait_until
from tests.sandbox.images import make_image
from tests.sandbox.test_containers import endpoint
from tests.sandbox.test_programs_of_containers import HOLDER, LIMITS, PROGRAMS, VARIABLES, use_endpoint_and_files

__all__ = ["endpoint"]

pytestmark = pytest.mark.skipif(shutil.which("apptainer") is None, reason="apptainer is not installed")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("image")
    make_image(folder, PROGRAMS)
    # Apptainer then prints a notice.
    assert not (folder / "etc/passwd").exists()
    return folder


@pytest.fixture
def settings(image: Path, endpoint: tuple[str, int]) -> ContainerSettings:
    return ContainerSettings(kind="apptainer", name="megarl-test", address=endpoint, image=str(image), limits=LIMITS)


def test_a_program_reaches_the_endpoint_alone_and_keeps_its_files(settings: ContainerSettings) -> None:
    asyncio.run(use_endpoint_and_files(settings))


async def test_limits_hold_and_a_cancelled_program_ends(settings: ContainerSettings) -> None:
    container = Container(settings)
    await container.start()
    commands = {
        "OutputLimit": ["yes"],
        "ProcessLimit": ["bash", "-c", "for n in {1..60}; do sleep 600 & done; wait"],
        # `tail` holds a line without end in memory.
        "MemoryLimit": ["bash", "-c", "head -c 500000000 /dev/zero | (tail > /dev/null; sleep 600)"],
    }
    for limit, command in commands.items():
        ran = await container.execute(command, VARIABLES)
        assert ran.outcome.startswith(f"{limit}: "), ran
    running = asyncio.create_task(container.execute(["sleep", "600"], VARIABLES))
    await asyncio.sleep(1.0)
    running.cancel()
    await asyncio.wait({running})
    ran = await container.execute(["sh", "-c", "echo on; echo error >&2"], VARIABLES)
    # No notice of apptainer, such as one about a missing /etc/passwd.
    assert (ran.stdout, ran.stderr) == ("on\n", "error\n"), ran
    await container.stop()


def test_an_image_that_does_not_exist_is_a_fault(settings: ContainerSettings, tmp_path: Path) -> None:
    assert find_start_fault(settings) is None
    absent = ContainerSettings(
        kind="apptainer", name="megarl-absent", address=settings.address, image=str(tmp_path / "absent.sif")
    )
    fault = find_start_fault(absent)
    assert fault is not None and "absent.sif" in fault


def test_nothing_runs_after_a_killed_holder(image: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(image), "apptainer"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        wait_until(lambda: any(process_name(process) == "sleep" for process in descendants(holder.pid)), seconds=60)
        started = list(descendants(holder.pid))
        os.kill(holder.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, started)), seconds=60)
