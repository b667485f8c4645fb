"""Group of rank processes on this machine.

A fork server forks each rank. The rank leads a session of its own, and talks to the driver over a socket pair.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Self

from megarl.cluster.call import Call
from megarl.cluster.connection import Connection
from megarl.cluster.rank_handle import RankHandle
from megarl.cluster.worker_group import PartOfRun, WorkerGroup
from megarl.files.private_folder import PrivateFolder
from megarl.groups.rendezvous import Rendezvous
from megarl.platform import native_stacks
from megarl.processes.fork_server import ForkedProcess, fork_server
from megarl.processes.open_files import provide_open_files

_HOST = "127.0.0.1"


class _LocalHandle(RankHandle):
    """Handle of a rank process on this machine. The driver has one end of a socket pair, the process the other."""

    def __init__(self, rank: int, environment: Mapping[str, str], imports: Sequence[str], log: Path) -> None:
        super().__init__(rank, log)
        self.place = int(environment["LOCAL_RANK"])
        with log.open("ab") as output:
            server = fork_server(environment, imports, output)
            self.process: ForkedProcess = server.fork(
                f"megarl rank {rank}", "megarl.cluster.rank:main", environment, output
            )
        self.connection = self.direct = Connection(self.process.connection, [self])
        self.process.ended.add_done_callback(self._notice_death)

    def _notice_death(self, ended: asyncio.Future[float]) -> None:
        self.died.set_result(ended.result())
        # A child of the rank may hold the other end open. Then the driver would never read an end of file.
        self.connection.cut()

    def kill(self) -> None:
        self.process.kill()

    def show_stacks(self) -> None:
        """Send a signal on which the rank writes the stacks of all threads to its log."""
        self.process.signal(signal.SIGUSR2)

    def is_stopped(self) -> bool:
        return self.process.pid is not None and native_stacks.is_stopped(self.process.pid)

    def obstacle(self) -> str:
        server = self.process.stopped_server
        return "" if server is None else f"its fork server (process {server}) is stopped"

    def thread_states(self) -> str:
        return "" if self.process.pid is None else native_stacks.thread_states(self.process.pid)

    def native_stacks(self, seconds: float) -> str:
        if self.process.pid is None:
            return "no native stacks: the process has not started"
        return native_stacks.native_stacks(self.process.pid, seconds)

    def release(self) -> None:
        super().release()
        self.process.release()

    def exit_reason(self, is_dead: bool) -> str:
        code = self.process.exit_code
        if not is_dead or code is None:
            return "lost its connection"
        how = f"exited with code {code}"
        if code < 0:
            name = signal.Signals(-code).name
            # Linux's out-of-memory killer sends SIGKILL, and leaves no other trace here.
            how = f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        return f"ended with its fork server, which {how}" if self.process.ended_with_server else how


def import_early(environment: Mapping[str, str], imports: Sequence[str]) -> None:
    """Start the fork server of a later `LocalGroup` with the same arguments, so that it imports in the meantime."""
    fork_server(_rank_variables(environment), imports)


def _rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables common to all ranks. The user's environment overrides the first two."""
    # Gloo uses loopback, because the host name may resolve to another interface.
    return {"PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ, **environment}


class LocalGroup(WorkerGroup):
    """Group of rank processes on this machine. Call `start` on a new object.

    The ranks share a private `TMPDIR`. `imports` are modules imported by the fork server once, before it forks the
    first rank.
    """

    def __init__(self, world_size: int, part: PartOfRun | None = None, *, imports: Sequence[str] = ()) -> None:
        super().__init__(world_size, part)
        self._imports = tuple(imports)
        self.hosts, self.topology = [_HOST] * world_size, [(socket.gethostname(),)] * world_size
        self._folder: PrivateFolder | None = None

    def show_stacks(self) -> None:
        for handle in self._handles:
            assert isinstance(handle, _LocalHandle)
            handle.show_stacks()

    async def find_stopped(self, call: Call, patience_seconds: float) -> tuple[list[RankHandle], Mapping[int, str]]:
        # The kernel says which process is stopped. So the others are not asked for stacks in vain.
        stopped = [handle for handle in call.silent() if isinstance(handle, _LocalHandle) and handle.is_stopped()]
        if not stopped:
            return [], {}
        stacks = await self.stacks.read()
        # One may have continued or ended meanwhile.
        silent = call.silent()
        return [h for h in stopped if h in silent and h.is_stopped() and not h.died.done()], stacks

    async def _start_processes(self, log_folder: Path, environment: Mapping[str, str]) -> None:
        provide_open_files(2 * self.world_size, f"{self.world_size} ranks")
        self._folder = self._folder or PrivateFolder()
        shared = {
            **_rank_variables(environment),
            "TMPDIR": str(self._folder.path),
            **{"WORLD_SIZE": str(self.world_size), "LOCAL_WORLD_SIZE": str(self.world_size)},
        }
        # All ranks are on this machine, whose number of places is not known.
        places = self._choose_places(self.part.first_rank, sys.maxsize, 1)
        for rank in range(self.world_size):
            if rank in self._inherited:
                self._handles.append(self._inherited[rank])
                continue
            # RANK counts within the group. LOCAL_RANK, the index of the GPU, counts over all groups on this machine.
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(places.pop(0))}
            number = self.part.first_rank + rank
            self._handles.append(_LocalHandle(number, own, self._imports, self._log_of(number, log_folder)))
        self.places = [handle.place for handle in self._handles]
        for rank, handle in enumerate(self._handles):
            if rank not in self._inherited:
                await handle.connection.open()

    async def reserve(self, count: int, leaving: Collection[WorkerGroup] = (), num_further: int = 0) -> None:
        # This machine can always start a process.
        pass

    @property
    def local_ranks(self) -> list[int]:
        return self.places

    def _heir(self, world_size: int, part: PartOfRun) -> Self:
        heir = type(self)(world_size, part, imports=self._imports)
        # Survivors have this folder in their environment (TMPDIR).
        heir._folder, self._folder = self._folder, None
        return heir

    def _rendezvous(self, port: int) -> Rendezvous:
        assert self._folder is not None
        # A new name for each world: the file of a lost world still holds its keys.
        return Rendezvous(self.part.key, file=str(self._folder.path / f"store_{secrets.token_hex(4)}"))

    async def _end(self, lost: Sequence[RankHandle] | None = None) -> None:
        await super()._end(lost)
        if self._folder is not None and not self.survivors:
            self._folder.remove()
            # A successor makes its own.
            self._folder = None
