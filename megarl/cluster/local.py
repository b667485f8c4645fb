"""A worker group of processes on this machine.

Each rank is a fresh interpreter in a session of its own that runs `python -m megarl.cluster.rank` and inherits one end
of a socket pair.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from megarl.cluster.rank_handle import RankHandle
from megarl.cluster.worker_group import WorkerGroup
from megarl.platform.private_folder import PrivateFolder
from megarl.platform.rendezvous import Rendezvous

_HOST = "127.0.0.1"


class _LocalHandle(RankHandle):
    """A child process at the other end of a socket pair."""

    def __init__(self, rank: int, environment: Mapping[str, str], log: Path) -> None:
        super().__init__(rank, log)
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        with theirs, log.open("ab") as output:
            number = theirs.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "megarl.cluster.rank", str(number), str(os.getpid())],
                env=environment,
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._pidfd = os.pidfd_open(self.process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._notice_death)

    def _notice_death(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self.died.set_result(time.time())
        with contextlib.suppress(OSError):  # a child of the rank may hold the other end open: no end of file would come
            self.socket.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        # The process is not reaped before, so the group id is still its own.
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def show_stacks(self) -> None:
        """Make the rank's fault handler write the stacks of all its threads to the log."""
        if self.process.returncode is None:
            os.kill(self.process.pid, signal.SIGUSR2)

    def release(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self.process.poll()
        os.close(self._pidfd)
        super().release()

    def exit_reason(self, is_dead: bool) -> str:
        code = self.process.returncode
        if not is_dead:
            return "lost its connection"
        if code >= 0:
            return f"exited with code {code}"
        name = signal.Signals(-code).name
        return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


class LocalGroup(WorkerGroup):
    """A `WorkerGroup` of child processes, which share a private `TMPDIR`. Make one with `start`."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.hosts, self.topology = [_HOST] * world_size, [(socket.gethostname(),)] * world_size
        self._folder: PrivateFolder | None = None

    def show_stacks(self) -> None:
        for handle in self._handles:
            assert isinstance(handle, _LocalHandle)
            handle.show_stacks()

    async def _start_processes(self, log_folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = PrivateFolder()
        shared = {
            **{"PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ, **environment},
            "TMPDIR": str(self._folder.path),
            **{"WORLD_SIZE": str(self.world_size), "LOCAL_WORLD_SIZE": str(self.world_size)},
        }
        for rank in range(self.world_size):
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._handles.append(_LocalHandle(rank, own, log_folder / f"rank_{rank:04d}.log"))

    def _rendezvous(self, port: int) -> Rendezvous:
        assert self._folder is not None
        return Rendezvous(self._key, file=str(self._folder.path / "store"))

    async def _end(self) -> None:
        await super()._end()
        if self._folder is not None:
            self._folder.remove()
