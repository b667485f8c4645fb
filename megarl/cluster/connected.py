"""A worker group whose ranks, wherever they were started, connect back to the driver.

Both ends of a connection prove that they know a key (`handshake`). Subclasses start the processes and notice their end:
`srun.SrunGroup`, `ray.RayGroup`. A process sends its node and switches and receives its rank: nodes under one switch
get consecutive ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import fcntl
import os
import signal
import socket
import struct
import tempfile
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl.cluster.handshake import StrangerError, admit, introduce, receive_json, send_json
from megarl.cluster.rank import serve
from megarl.cluster.rank_handle import RankHandle, log_tail
from megarl.cluster.topology import Introduction, environments, in_order, rank_topology
from megarl.cluster.worker_group import PartOfRun, WorkerGroup
from megarl.platform import rendezvous
from megarl.platform.private_folder import PrivateFolder
from megarl.platform.rendezvous import Rendezvous
from megarl.types import PeerLostError

_INTRODUCTION_SECONDS = 10
_END_SECONDS = 60.0
_STRANGERS = 64
_SIOCGIFADDR = 0x8915

Address = tuple[str, int]
"""Host and port."""


class _RemoteHandle(RankHandle):
    """The handle of a process on any node; it can be ended only together with all others."""

    def __init__(self, rank: int, node: str, connected: socket.socket, log: Path, group: ConnectedGroup) -> None:
        super().__init__(rank, log)
        self.node, self._group = node, group
        self.socket = connected
        self.socket.setblocking(False)

    def kill(self) -> None:
        self._group.end_processes()

    def exit_reason(self, is_dead: bool) -> str:
        return f"on node {self.node} ended or lost its connection"


class ConnectedGroup(WorkerGroup):
    """A `WorkerGroup` of processes that a launcher starts on several nodes."""

    def __init__(self, world_size: int, part: PartOfRun | None = None) -> None:
        super().__init__(world_size, part)
        self.start_log = f"start_{self.part.first_rank:04d}.log" if self.part.first_rank else "start.log"
        """Log of the processes until they know their ranks."""
        self._remote_handles: list[_RemoteHandle] = []
        self._addresses: list[str] = []
        self._ended: asyncio.Task[str] | None = None

    @abstractmethod
    async def launch(self, log_folder: Path, environment: Mapping[str, str], address: Address, key: bytes) -> None:
        """Start the processes, each to call `connect` with this address and key."""

    @abstractmethod
    async def await_end(self) -> str:
        """Wait until all processes have ended; returns how, in words."""

    @abstractmethod
    def end_processes(self) -> None:
        """Have the launcher kill what still runs; may be called again."""

    def local_ranks(self, processes: Sequence[Introduction]) -> Sequence[int] | None:
        """Each rank's place among all ranks of its node; None where no other group is there."""
        return None

    def show_stacks(self) -> None:
        """Do nothing, unless the launcher can reach the processes."""

    def _show_last_stacks(self) -> None:
        # A byte of urgent data raises SIGURG in a rank that reads nothing, on any node. A second one could become part
        # of what the rank reads, so it is only sent to ranks that are about to be killed.
        for handle in self._handles:
            with contextlib.suppress(OSError):
                handle.socket.send(b"!", socket.MSG_OOB)

    def host(self) -> str:
        """The host name or address at which other nodes reach this one."""
        return socket.gethostname()

    async def _start_processes(self, log_folder: Path, environment: Mapping[str, str]) -> None:
        met: dict[Introduction, socket.socket] = {}
        with socket.create_server(("", 0), backlog=self.world_size + _STRANGERS) as server:
            server.setblocking(False)
            address = self.host(), server.getsockname()[1]
            await self.launch(log_folder, {"PYTHONUNBUFFERED": "1", **environment}, address, self.part.key)
            self._ended = asyncio.create_task(self._watch())
            try:
                await asyncio.wait_for(self._meet(met, server, log_folder), self.start_timeout_seconds)
            except TimeoutError:
                present = Counter(process.node for process in met)
                raise PeerLostError(
                    f"{len(met)} of {self.world_size} ranks connected within {self.start_timeout_seconds:g} s "
                    f"({', '.join(f'{count} on {node}' for node, count in present.items()) or 'none'}); look at "
                    f"{log_folder} and at the nodes, or raise cluster.start_timeout_seconds"
                ) from None
            finally:
                self._make_handles(met, log_folder)
        await asyncio.get_running_loop().run_in_executor(None, self._tell_ranks, in_order(met))

    def _rendezvous(self, port: int) -> Rendezvous:
        return Rendezvous(self.part.key, host=self._addresses[0], port=port)

    def _make_handles(self, met: Mapping[Introduction, socket.socket], log_folder: Path) -> None:
        self._remote_handles = [
            _RemoteHandle(rank, process.node, met[process], log_folder / f"rank_{rank:04d}.log", self)
            for rank, process in enumerate(in_order(met), self.part.first_rank)
        ]
        self._handles = list(self._remote_handles)
        if self._ended is not None and self._ended.done():
            self._note_end()

    def _tell_ranks(self, processes: Sequence[Introduction]) -> None:
        self.hosts, self.topology = [process.host for process in processes], rank_topology(processes)
        self._addresses = reached_at(
            [(s.socket.getpeername()[0], s.socket.getsockname()[0]) for s in self._remote_handles]
        )
        own = environments(processes, self.local_ranks(processes))
        told = zip(self._remote_handles, own, self._addresses, strict=True)
        for handle, environment, address in told:
            handle.socket.setblocking(True)
            own = {
                "environment": environment,
                "log": str(handle.log.absolute()),
                "address": address,
            }
            try:
                send_json(handle.socket, own)
            except OSError as error:
                raise PeerLostError(
                    f"a process on node {handle.node} was lost before it had its rank: {error}"
                ) from None
            handle.socket.setblocking(False)

    def _note_end(self) -> None:
        for handle in self._remote_handles:
            handle.died.set_result(time.time())
            with contextlib.suppress(OSError):  # a node that lost its power ends no connection
                handle.socket.shutdown(socket.SHUT_RDWR)

    async def _watch(self) -> str:
        how = await self.await_end()
        self._note_end()
        return how

    async def _meet(self, met: dict[Introduction, socket.socket], server: socket.socket, log_folder: Path) -> None:
        """Accept connections, concurrently, until all processes have introduced themselves. Raises PeerLostError."""
        loop, ended = asyncio.get_running_loop(), self._ended
        assert ended is not None
        complete: asyncio.Future[None] = loop.create_future()
        # Strangers may hold a connection each for a while, not all descriptors of the driver.
        room = asyncio.Semaphore(self.world_size + _STRANGERS)

        async def hear(connected: socket.socket) -> None:
            connected.setblocking(False)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                told = await asyncio.wait_for(admit(connected, self.part.key), _INTRODUCTION_SECONDS)
                met[Introduction.from_plain(told)] = connected
            except (StrangerError, OSError, ValueError, TypeError, TimeoutError):
                connected.close()
            except asyncio.CancelledError:
                connected.close()
                raise
            finally:
                room.release()
            if len(met) == self.world_size and not complete.done():
                complete.set_result(None)

        async def accept() -> None:
            async with asyncio.TaskGroup() as heard:
                while True:
                    await room.acquire()
                    connected, _ = await loop.sock_accept(server)
                    heard.create_task(hear(connected))

        accepting = asyncio.create_task(accept())
        try:
            await asyncio.wait([accepting, ended, complete], return_when=asyncio.FIRST_COMPLETED)
        finally:
            accepting.cancel()
            await asyncio.wait([accepting])
        if not complete.done():
            how = ended.result() if ended.done() else f"accepting connections failed: {accepting.exception()}"
            raise PeerLostError(f"{how} before all ranks connected\n{log_tail(log_folder / self.start_log)}")

    async def _end(self) -> None:
        await super()._end()
        self.end_processes()
        if self._ended is not None:
            # A scheduler that does not answer shall not keep the driver.
            await asyncio.wait([self._ended], timeout=_END_SECONDS)


def connect(address: Address, key: bytes, process: Introduction) -> None:
    """The main function of a process: introduce it to the driver, receive its rank, serve as that rank."""
    sock = socket.create_connection(address)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    introduce(sock, key, process._asdict())
    told = receive_json(sock)
    os.environ.update(told["environment"])
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_of(told["address"])):
        os.environ["GLOO_SOCKET_IFNAME"] = name
    output = os.open(told["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(output, stream)
    fcntl.fcntl(sock, fcntl.F_SETOWN, os.getpid())
    faulthandler.register(signal.SIGURG, all_threads=True)  # see `_show_last_stacks`
    folder = PrivateFolder()
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder.path)
    try:
        serve(sock, rendezvous.listen(told["address"]) if os.environ["RANK"] == "0" else 0)
    finally:
        folder.remove()


def interface_of(address: str) -> str | None:
    """The network interface whose first IPv4 address this is; None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                if socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFADDR, request)[20:24]) == address:
                    return name
    return None


def reached_at(connections: Sequence[tuple[str, str]]) -> list[str]:
    """Addresses at which other nodes reach the ranks, from the ends (rank's, driver's) of their connections.

    A rank on the driver's own machine may have connected through the loopback interface: it gets the driver's address
    of connections from other machines.
    """
    arrived = next((own for theirs, own in connections if theirs != own), None)
    return [(arrived or own) if theirs == own else theirs for theirs, own in connections]
