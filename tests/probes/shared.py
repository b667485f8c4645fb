"""Not collected by itself: a process of a server whose module notes each import (test_shared_fork_servers)."""

from __future__ import annotations

import asyncio
import os
import tempfile

from megarl.processes.fork_server import ForkServer


async def say() -> list[str]:
    """Return what the module's function in a forked process says."""
    with tempfile.TemporaryFile() as log:
        process = ForkServer(os.environ, ["shared_probe"], log).fork("probe", "shared_probe:wait", os.environ, log)
    with process.connection.makefile() as lines:
        words = (await asyncio.to_thread(lines.readline)).split()
    process.kill()
    await process.ended
    process.release()
    return words


def test_forks() -> None:
    assert asyncio.run(say())[-1] == os.environ["PYTEST_XDIST_WORKER"]
