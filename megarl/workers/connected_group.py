"""A worker group whose ranks, wherever they were started, connect back to the driver.

Connections prove on both sides that they know a key (HMAC, the standard library's). How processes are started, and
what tells that they ended, is the launcher's part: `srun_group`, `ray_group`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import struct
import time
from abc import abstractmethod
from collections.abc import Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path

from megarl.types import PeerLostError
from megarl.workers.process_group import ProcessGroup, Seat, log_tail
from megarl.workers.rank import serve

_INTRODUCTION_SECONDS = 10
_END_SECONDS = 60.0

Address = tuple[str, int]
"""Host and port."""


class _RemoteSeat(Seat):
    """A process on some node, that can be ended with all the others only."""

    def __init__(self, rank: int, node: str, connected: socket.socket, log: Path, group: ConnectedGroup) -> None:
        super().__init__(rank, log)
        self.node, self._group = node, group
        self.socket = connected
        self.socket.setblocking(False)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        if number == signal.SIGABRT:
            self._group.show_stacks()
        else:
            self._group.end_processes()

    def fate(self, is_dead: bool) -> str:
        return f"on node {self.node} ended or lost its connection"


class ConnectedGroup(ProcessGroup):
    """The `WorkerGroup` of processes that a launcher starts on several nodes."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self._seated: list[_RemoteSeat] = []
        self._ended: asyncio.Task[str] | None = None

    @abstractmethod
    async def launch(self, log_folder: Path, environment: Mapping[str, str], address: Address, key: bytes) -> None:
        """Start the processes, each to call `connect` with this address and key, its output in `log_folder`."""

    @abstractmethod
    async def await_end(self) -> str:
        """Wait until the processes have ended, all of them; how, in words."""

    @abstractmethod
    def end_processes(self) -> None:
        """Have the launcher kill what still runs; may be called again."""

    def show_stacks(self) -> None:
        """Have the processes write to their logs where each of their threads is, if the launcher can reach them."""

    def host(self) -> str:
        """How other nodes reach this one."""
        return socket.gethostname()

    async def _start_processes(self, log_folder: Path, environment: Mapping[str, str], timeout_seconds: float) -> None:
        # Kept from others but not from rank 0 on this node: bound, address reusable, not listening.
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("", 0))
        shared = {
            "PYTHONUNBUFFERED": "1", **environment, "MASTER_ADDR": self.host(),
            "MASTER_PORT": str(self._port.getsockname()[1]), "WORLD_SIZE": str(self.world_size),
        }  # fmt: skip
        key = secrets.token_bytes(32)
        with socket.create_server(("", 0), backlog=self.world_size) as server:
            server.setblocking(False)
            await self.launch(log_folder, shared, (self.host(), server.getsockname()[1]), key)
            self._ended = asyncio.create_task(self._watch())
            try:
                await asyncio.wait_for(self._seat_all(server, key, log_folder), timeout_seconds)
            except TimeoutError:
                present = {seat.rank for seat in self._seated}
                absent = [rank for rank in range(self.world_size) if rank not in present]
                raise PeerLostError(
                    f"ranks {absent} of {self.world_size} did not connect within {timeout_seconds:g} s; look at "
                    f"{log_folder} and at the nodes, or raise cluster.start_timeout_seconds"
                ) from None

    async def _watch(self) -> str:
        how = await self.await_end()
        for seat in self._seated:
            seat.died.set_result(time.time())
        return how

    async def _seat_all(self, server: socket.socket, key: bytes, log_folder: Path) -> None:
        loop, ended = asyncio.get_running_loop(), self._ended
        assert ended is not None
        while len(self._seated) < self.world_size:
            accepted = asyncio.ensure_future(loop.sock_accept(server))
            try:
                await asyncio.wait([accepted, ended], return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not accepted.done():
                    accepted.cancel()
            if ended.done():
                tail = log_tail(log_folder / "rank_0000.log")
                raise PeerLostError(f"{ended.result()} before all ranks connected\n{tail}")
            connected, _ = accepted.result()
            if (known := await loop.run_in_executor(None, _introduced, connected, key)) is None:
                connected.close()
                continue
            rank, node = known
            self._seated.append(_RemoteSeat(rank, node, connected, log_folder / f"rank_{rank:04d}.log", self))
            self._seats = sorted(self._seated, key=lambda seat: seat.rank)

    async def _end(self) -> None:
        await super()._end()
        self.end_processes()
        if self._ended is not None:
            # A scheduler that does not answer shall not keep the driver.
            await asyncio.wait([self._ended], timeout=_END_SECONDS)


def connect(address: Address, key: bytes, node: str) -> None:
    """In a rank's process: connect to the driver and serve it as the rank that `RANK` names, until it closes."""
    with Client(address, authkey=key) as connection:
        connection.send((int(os.environ["RANK"]), node))
        sock = socket.socket(fileno=os.dup(connection.fileno()))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    serve(sock)


def _introduced(connected: socket.socket, key: bytes) -> tuple[int, str] | None:
    """Rank and node at the other end of a new connection; None of one that does not know the key."""
    connected.setblocking(True)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _INTRODUCTION_SECONDS, 0))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        with Connection(os.dup(connected.fileno())) as connection:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            return connection.recv()
    except (AuthenticationError, OSError, EOFError, ValueError):
        return None
