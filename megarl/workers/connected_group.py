"""A worker group whose ranks, wherever they were started, connect back to the driver.

Connections prove on both sides that they know a key (HMAC, the standard library's). How processes are started, and
what tells that they ended, is the launcher's part: `srun_group`, `ray_group`. A process says where it stands in the
network and is told its rank: nodes of one switch get ranks that follow each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import struct
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path

from megarl.types import PeerLostError
from megarl.workers.process_group import ProcessGroup, Seat, log_tail
from megarl.workers.rank import serve
from megarl.workers.topology import Introduction, environments, in_order, places

START_LOG = "start.log"
"""What processes write before they know their ranks."""

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
    """A `ProcessGroup` of processes that a launcher starts on several nodes."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self._seated: list[_RemoteSeat] = []
        self._ended: asyncio.Task[str] | None = None

    @abstractmethod
    async def launch(self, log_folder: Path, environment: Mapping[str, str], address: Address, key: bytes) -> None:
        """Start the processes, each to call `connect` with this address and key."""

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

    async def _start_processes(self, log_folder: Path, environment: Mapping[str, str]) -> None:
        key = secrets.token_bytes(32)
        met: dict[Introduction, socket.socket] = {}
        with socket.create_server(("", 0), backlog=self.world_size) as server:
            server.setblocking(False)
            address = self.host(), server.getsockname()[1]
            await self.launch(log_folder, {"PYTHONUNBUFFERED": "1", **environment}, address, key)
            self._ended = asyncio.create_task(self._watch())
            try:
                await asyncio.wait_for(self._meet(met, server, key, log_folder), self.start_timeout_seconds)
            except TimeoutError:
                present = Counter(process.node for process in met)
                raise PeerLostError(
                    f"{len(met)} of {self.world_size} ranks connected within {self.start_timeout_seconds:g} s "
                    f"({', '.join(f'{count} on {node}' for node, count in present.items()) or 'none'}); look at "
                    f"{log_folder} and at the nodes, or raise cluster.start_timeout_seconds"
                ) from None
            finally:
                self._seat(met, log_folder)
        await asyncio.get_running_loop().run_in_executor(None, self._tell_ranks, in_order(met))

    def _seat(self, met: Mapping[Introduction, socket.socket], log_folder: Path) -> None:
        self._seated = [
            _RemoteSeat(rank, process.node, met[process], log_folder / f"rank_{rank:04d}.log", self)
            for rank, process in enumerate(in_order(met))
        ]
        self._seats = list(self._seated)
        if self._ended is not None and self._ended.done():
            self._note_end()

    def _tell_ranks(self, processes: Sequence[Introduction]) -> None:
        self.hosts, self.places = [process.host for process in processes], places(processes)
        for seat, environment in zip(self._seated, environments(processes), strict=True):
            seat.socket.setblocking(True)
            try:
                with Connection(os.dup(seat.socket.fileno())) as connection:
                    connection.send((environment, str(seat.log.absolute())))
            except OSError as error:
                raise PeerLostError(f"a process on node {seat.node} was lost before it had its rank: {error}") from None
            seat.socket.setblocking(False)

    def _note_end(self) -> None:
        for seat in self._seated:
            seat.died.set_result(time.time())
            with contextlib.suppress(OSError):  # a node that lost its power ends no connection
                seat.socket.shutdown(socket.SHUT_RDWR)

    async def _watch(self) -> str:
        how = await self.await_end()
        self._note_end()
        return how

    async def _meet(
        self, met: dict[Introduction, socket.socket], server: socket.socket, key: bytes, log_folder: Path
    ) -> None:
        """Wait until all processes have introduced themselves."""
        loop, ended = asyncio.get_running_loop(), self._ended
        assert ended is not None
        while len(met) < self.world_size:
            accepted = asyncio.ensure_future(loop.sock_accept(server))
            try:
                await asyncio.wait([accepted, ended], return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not accepted.done():
                    accepted.cancel()
            if ended.done():
                raise PeerLostError(f"{ended.result()} before all ranks connected\n{log_tail(log_folder / START_LOG)}")
            connected, _ = accepted.result()
            if (process := await loop.run_in_executor(None, _introduced, connected, key)) is None:
                connected.close()
            else:
                met[process] = connected

    async def _end(self) -> None:
        await super()._end()
        self.end_processes()
        if self._ended is not None:
            # A scheduler that does not answer shall not keep the driver.
            await asyncio.wait([self._ended], timeout=_END_SECONDS)


def connect(address: Address, key: bytes, process: Introduction) -> None:
    """In a process: introduce it to the driver, with a port of its own; take the rank that it gives; serve as that."""
    with Client(address, authkey=key) as connection, socket.socket() as kept:
        # Kept from others but not from this process's own store: bound, address reusable, not listening.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("", 0))
        connection.send(process._replace(port=kept.getsockname()[1]))
        environment, log = connection.recv()
        os.environ.update(environment)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(output, stream)
        sock = socket.socket(fileno=os.dup(connection.fileno()))
        connection.close()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        serve(sock)


def _introduced(connected: socket.socket, key: bytes) -> Introduction | None:
    """What the process at the other end of a new connection says of itself; None of one that does not know the key."""
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
