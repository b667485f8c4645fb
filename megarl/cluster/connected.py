"""Group of ranks on any nodes, whose processes connect to the driver over TCP after a launcher started them.

Both ends of a connection prove that they know a secret key (`handshake`). Subclasses start the processes and notice
their end: `srun.SrunGroup`, `ray.RayGroup`. A process sends its node and network switches, and receives its rank. Nodes
under one switch get consecutive ranks. With many ranks, the driver connects to one relay process per node (`relay`).
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import fcntl
import os
import secrets
import signal
import socket
import struct
import tempfile
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from megarl.cluster import relay
from megarl.cluster.connection import Connection
from megarl.cluster.handshake import STRANGERS, introduce, meet, pack_json, receive_json
from megarl.cluster.messages import Inbox
from megarl.cluster.rank import serve
from megarl.cluster.rank_handle import RankHandle, log_tail
from megarl.cluster.topology import Introduction, environments, in_order, rank_topology
from megarl.cluster.worker_group import PartOfRun, WorkerGroup
from megarl.files.private_folder import PrivateFolder
from megarl.groups import rendezvous
from megarl.groups.rendezvous import Rendezvous
from megarl.platform import chosen_device
from megarl.processes.open_files import provide_open_files
from megarl.types import PeerLostError

_EXIT_SECONDS = 5.0
"""Seconds for processes to exit after their connections have ended."""
_END_SECONDS = 60.0
"""Seconds to wait for the launcher (srun or Ray) to end all processes."""
_SILENT_SECONDS = 30
"""Seconds without an answer to keepalive probes after which a connection ends, if the group keeps survivors."""
_UNREAD_SECONDS = 120
"""Seconds after which such a connection ends because sent data was not received."""
_SIOCGIFADDR = 0x8915
"""Number of Linux's ioctl returning the IPv4 address of a network interface."""

Address = tuple[str, int]
"""Host and TCP port."""


class RemoteHandle(RankHandle):
    """Handle of a rank process on any node. Only a group that keeps survivors can end a single process."""

    def __init__(
        self, rank: int, process: Introduction, connected: socket.socket, log: Path, group: ConnectedGroup, place: int
    ) -> None:
        super().__init__(rank, log)
        if group.keeps_survivors:
            _notice_silence(connected)
        # Otherwise the launcher ends all processes for one, and reports it.
        on_end = self.note_end if group.keeps_survivors else lambda: None
        self.connection = self.direct = Connection(connected, [self], on_end=on_end)
        self.process, self.node, self.turn, self._group = process, process.node, process.turn, group
        self.place = place
        self.addresses = "", ""
        """IP addresses of the process and of the driver on their connection; empty if the connection has already
        ended.
        """
        # Read now: a connection that ends while others are opened has no addresses any more.
        with contextlib.suppress(OSError):
            self.addresses = connected.getpeername()[0], connected.getsockname()[0]
        self.ended_at: float | None = None
        """Time in seconds since 1970 at which the launcher saw this process end, if it was the first to end; otherwise
        None.
        """

    def send_json(self, message: dict[str, Any]) -> None:
        """Send a JSON message to the process, before it starts to serve calls. Raises PeerLostError if the connection
        ended.
        """
        if self.direct.is_lost:
            raise PeerLostError(f"a process on node {self.node} was lost before it received its rank number")
        self.direct.send(pack_json(message))

    def note_end(self) -> None:
        """Record the end of the process. Does nothing if it is known already."""
        if not self.died.done():
            self.died.set_result(time.time())

    def kill(self) -> None:
        # Also after the end of the connection: behind a broken network the process may still run.
        self._group.kill_process(self)

    def native_stacks(self, seconds: float) -> str:
        return self._group.places_of_threads(self, seconds)

    def _lost_at(self, noticed: float) -> float:
        # `died` completes for all processes together. Only the launcher's report, or the end of the connection, shows
        # which process was first.
        return noticed if self.ended_at is None else min(noticed, self.ended_at)

    @property
    def is_cut_off(self) -> bool:
        return self.connection.is_relay and self in self.connection.cut_off and self.ended_at is None

    def exit_reason(self, is_dead: bool) -> str:
        if self.is_cut_off:
            return f"was cut off: the relay of its node {self.node} ended or lost its connection"
        return f"on node {self.node} ended or lost its connection"


class ConnectedGroup(WorkerGroup):
    """Group of rank processes started by a launcher on several nodes."""

    def __init__(
        self,
        world_size: int,
        part: PartOfRun | None = None,
        *,
        ranks_per_node: int | None = None,
        first_place: int = 0,
    ) -> None:
        """Create a group without processes, with places for `ranks_per_node` ranks on a node; None: all on one node.

        `first_place` is the place of its first process. Other groups have the places before it.
        """
        super().__init__(world_size, part)
        # A shared file system may take long to show what a rank writes.
        self.stacks.most_seconds = 60.0
        self.ranks_per_node, self._first_place = ranks_per_node or world_size, first_place
        self.new_places: list[int] = []
        """Places of the processes that `launch` has to start, in the order of their turns."""
        self.start_log = f"start_{self.part.first_rank:04d}.log" if self.part.first_rank else "start.log"
        """Name of the log file that all processes write to until they know their ranks."""
        self._remote_handles: list[RemoteHandle] = []
        """Ranks whose processes this group has started, in the order of their ranks."""
        self._addresses: list[str] = []
        self._silent_nodes: set[int] = set()
        """Indices of the nodes on which the newest successful `reserve` could not start a process. The group that
        follows this one places no new process on them.
        """
        self._former: list[ConnectedGroup] = []
        """Predecessors of this group. Some of its processes belong to their launches."""
        self._ended: asyncio.Task[str] | None = None
        self._key = secrets.token_bytes(32)
        """Secret key of this start of the group. It keeps out late processes of an earlier start."""
        self.most_direct = 64
        """Maximum number of ranks that send their answers to the driver directly. With more ranks, each node with
        several ranks has a relay.
        """

    @abstractmethod
    async def launch(self, log_folder: Path, environment: Mapping[str, str], address: Address, key: bytes) -> None:
        """Start a process on each of `new_places`. It must call `connect` with this address and secret key."""

    @abstractmethod
    async def await_end(self) -> str:
        """Wait until all processes have ended. Returns how they ended, as text."""

    @abstractmethod
    def end_processes(self) -> None:
        """Let the launcher kill the remaining processes. Calling it again has no effect."""

    def kill_process(self, handle: RemoteHandle) -> None:
        """Kill a process that this group has started. Here: all of them, because the launcher cannot end a single
        one.
        """
        self.end_processes()

    def places_of_threads(self, handle: RemoteHandle, seconds: float) -> str:
        """Return where a process's threads are, in the kernel and in native code, or why that is not known.

        Takes `seconds` at most. Here: not known, because not every launcher can start a program on a rank's node.
        """
        return "no native stacks: this launcher starts no program on the rank's node"

    def note_lost(self, turn: int) -> None:
        """Record that one process has ended (`turn` is its index), while others go on."""
        for handle in self._remote_handles:
            if handle.turn == turn:
                _cut_off(handle)

    def note_first_end(self, turn: int) -> None:
        """Record which process ended first (`turn` is its index), before the others are ended because of it.

        The driver may notice the ends of the others sooner.
        """
        for handle in self._remote_handles:
            if handle.turn == turn:
                handle.ended_at = time.time()

    def show_stacks(self) -> None:
        """Make the ranks write their stacks to their logs. Here: do nothing, because not every launcher can reach the
        ranks.
        """

    def ask_for_stacks(self, handles: Sequence[RankHandle]) -> Sequence[RankHandle]:
        # A byte of urgent TCP data raises SIGURG in a rank on any node. The rank's reading thread skips the byte. A
        # second byte before the first is skipped (in a stopped rank) could become part of a message.
        asked: list[RankHandle] = []
        for handle in handles:
            # A connection that has ended, or whose buffer is full of a command.
            with contextlib.suppress(OSError):
                handle.direct.socket.send(b"!", socket.MSG_OOB)
                asked.append(handle)
        return asked

    def host(self) -> str:
        """Return the host name or address at which other nodes reach the driver's machine."""
        return socket.gethostname()

    async def _start_processes(self, log_folder: Path, environment: Mapping[str, str]) -> None:
        if self.others() and not self._former:
            # An earlier group may write to the log of this name, because numbers of ranks change.
            self.start_log = f"start_{self.part.first_rank:04d}_{secrets.token_hex(2)}.log"
        silent = self._former[-1]._silent_nodes if self._former else ()
        self.new_places = self._choose_places(self._first_place, self.ranks_per_node, self.kind.nodes, silent)
        if not self.new_places:
            self._handles = [self._inherited[rank] for rank in range(self.world_size)]
            self._introduce_ranks({})
            return
        provide_open_files(2 * self.world_size + STRANGERS, f"{self.world_size} ranks")
        connections: dict[Introduction, socket.socket] = {}
        with socket.create_server(("", 0), backlog=len(self.new_places) + STRANGERS) as server:
            server.setblocking(False)
            address = self.host(), server.getsockname()[1]
            await self.launch(log_folder, {"PYTHONUNBUFFERED": "1", **environment}, address, self._key)
            self._ended = asyncio.create_task(self._watch())
            try:
                meeting = meet(connections, server, self._key, len(self.new_places), Introduction.from_plain)
                await asyncio.wait_for(self._until_ended(meeting, log_folder), self.start_timeout_seconds)
            except TimeoutError:
                present = Counter(process.node for process in connections)
                raise PeerLostError(
                    f"{len(connections)} of {len(self.new_places)} ranks connected within "
                    f"{self.start_timeout_seconds:g} s "
                    f"({', '.join(f'{count} on {node}' for node, count in present.items()) or 'none'}); look at "
                    f"{log_folder} and at the nodes, or raise cluster.start_timeout_seconds\n"
                    + log_tail(log_folder / self.start_log)
                ) from None
            finally:
                await self._make_handles(connections, log_folder)
            # A relay ends with its node's first rank, and other ranks of the node shall survive that.
            is_relayed = self.world_size > self.most_direct and not self.keeps_survivors
            relays = self._nodes_with_relay() if is_relayed else {}
            self._introduce_ranks(relays)
            if relays:
                await self._meet_relays(relays, server, log_folder)

    def _rendezvous(self, port: int) -> Rendezvous:
        return Rendezvous(self.part.key, host=self._addresses[0], port=port)

    def _store_address(self) -> str:
        return self._addresses[0]

    async def _make_handles(self, met: Mapping[Introduction, socket.socket], log_folder: Path) -> None:
        """Create a handle for each connected process, in the order of their ranks."""
        # Processes that replace lost ones were placed for their ranks.
        places = sorted(met, key=lambda process: process.turn) if self._former else in_order(met)
        numbers = [self.part.first_rank + rank for rank in self.missing_ranks]
        self._remote_handles = [
            RemoteHandle(
                rank, process, met[process], self._log_of(rank, log_folder), self, self.new_places[process.turn]
            )
            for rank, process in zip(numbers, places, strict=False)  # some may not have connected
        ]
        self._handles = sorted([*self._remote_handles, *self._inherited.values()], key=lambda handle: handle.rank)
        # Before `open`, which waits: from here on, `_watch` itself notes the ends on these handles.
        if self._ended is not None and self._ended.done():
            self._note_all_ended()
        for handle in self._remote_handles:
            await handle.direct.open()

    @property
    def local_ranks(self) -> list[int]:
        return [place % self.ranks_per_node for place in self.places]

    def _node_of(self, place: int) -> int:
        """Return the number of a place's node."""
        return place // self.ranks_per_node

    def arranged(self, count: int) -> list[int | None]:
        ranks_on: dict[int, list[int]] = {}
        for rank, place in enumerate(self.places[:count]):
            ranks_on.setdefault(self._node_of(place), []).append(rank)
        arranged: list[int | None] = []
        for ranks in ranks_on.values():
            # New processes fill the nodes, so that ranks of a node stay consecutive.
            new = min(max(0, count - self.world_size - arranged.count(None)), self.ranks_per_node - len(ranks))
            arranged += [*ranks, *[None] * new]
        return arranged + [None] * (count - len(arranged))

    def _nodes_with_relay(self) -> dict[int, list[RemoteHandle]]:
        """Return the ranks of each node that has several, by the first of them. This first rank starts the node's
        relay.
        """
        on_node: dict[str, list[RemoteHandle]] = {}
        for handle in self._remote_handles:
            on_node.setdefault(handle.node, []).append(handle)
        return {handles[0].rank: handles for handles in on_node.values() if len(handles) > 1}

    def _introduce_ranks(self, relays: Mapping[int, Sequence[RemoteHandle]]) -> None:
        """Send each new process its rank, environment variables, log file, and the addresses of driver and relay."""
        handles = [handle for handle in self._handles if isinstance(handle, RemoteHandle)]
        processes = [handle.process for handle in handles]
        self.hosts, self.topology = [process.host for process in processes], rank_topology(processes)
        self._addresses = reached_at([handle.addresses for handle in handles])
        is_relayed = {handle for handles in relays.values() for handle in handles}
        self.places = [handle.place for handle in handles]
        environs = list(environments(processes, self.local_ranks))
        for handle, environment, address in zip(handles, environs, self._addresses, strict=True):
            if handle not in self._remote_handles:
                continue
            own = {
                "rank": handle.rank,
                "environment": environment,
                "log": str(handle.log.absolute()),
                "address": address,
                "is_relayed": handle in is_relayed,
                "relays": [relayed.rank for relayed in relays.get(handle.rank, ())],
            }
            handle.send_json(own)

    async def _meet_relays(
        self, relays: Mapping[int, Sequence[RemoteHandle]], server: socket.socket, log_folder: Path
    ) -> None:
        """Accept the connections of the nodes' relays, and send the ranks their relay's address.

        Raises PeerLostError if a relay does not connect in time.
        """
        met: dict[int, socket.socket] = {}
        addresses: dict[int, dict[str, Any]] = {}

        def first_rank(message: dict[str, Any]) -> int:
            first = int(message.get("first_rank", -1))
            if first not in relays or first in addresses:
                raise ValueError(
                    f"rank {first} is not the first rank of a node, or the node's relay has already connected"
                )
            addresses[first] = {"host": message["host"], "port": message["port"]}
            return first

        try:
            meeting = meet(met, server, self._key, len(relays), first_rank)
            await asyncio.wait_for(self._until_ended(meeting, log_folder), self.start_timeout_seconds)
        except TimeoutError:
            lacking = ", ".join(handles[0].node for first, handles in relays.items() if first not in met)
            raise PeerLostError(
                f"the relays of nodes {lacking} did not connect within {self.start_timeout_seconds:g} s; look at "
                f"{log_folder}, or raise cluster.start_timeout_seconds"
            ) from None
        finally:
            connections = {first: Connection(met[first], relays[first], is_relay=True) for first in met}
            # All are assigned before the first is opened, so that each is closed even if opening them is cut short.
            for first, connection in connections.items():
                for handle in relays[first]:
                    handle.connection = connection
            for connection in connections.values():
                await connection.open()
        for first, handles in relays.items():
            for handle in handles:
                handle.send_json(addresses[first])

    def _note_all_ended(self) -> None:
        """Record that all processes have ended, and close their connections."""
        for handle in self._remote_handles:
            _cut_off(handle)

    async def _watch(self) -> str:
        """Wait until all processes have ended, record it, and return how they ended, as text."""
        how = await self.await_end()
        self._note_all_ended()
        return how

    async def _until_ended(self, meeting: Coroutine[Any, Any, None], log_folder: Path) -> None:
        """Wait until all processes or relays have connected (`meeting`).

        Raises PeerLostError if that fails, or if the processes end before.
        """
        ended, task = self._ended, asyncio.create_task(meeting)
        assert ended is not None
        try:
            await asyncio.wait([task, ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_done = task.done()
            task.cancel()
            await asyncio.wait([task])
        if not is_done or task.exception() is not None:
            how = f"accepting connections failed: {task.exception()}" if is_done else ended.result()
            raise PeerLostError(f"{how} before all ranks connected\n{log_tail(log_folder / self.start_log)}")

    def _heir(self, world_size: int, part: PartOfRun) -> Self:
        heir = self._sibling(world_size, part)
        heir._former = [*self._former, self]
        # A log of its own: processes of earlier starts may still write to theirs in this folder.
        heir.start_log = f"start_{self.part.first_rank:04d}_{len(heir._former)}.log"
        return heir

    async def reserve(self, count: int, leaving: Collection[WorkerGroup] = (), num_further: int = 0) -> None:
        raise NotImplementedError(f"{type(self).__name__} cannot start further processes")

    def _sibling(self, world_size: int, part: PartOfRun) -> Self:
        """Return a group of this class for the same nodes, which takes over what the launcher gave this one."""
        raise NotImplementedError(f"{type(self).__name__} cannot replace single processes")

    async def _end(self, lost: Sequence[RankHandle] | None = None) -> None:
        groups = [*self._former, self]
        ends = [group._ended for group in groups if group._ended is not None]
        if lost is None or not self.keeps_survivors:
            if ends and all(handle.died.done() for handle in self._handles):
                # Processes whose connections have ended are about to exit.
                await asyncio.wait(ends, timeout=_EXIT_SECONDS)
            for group in groups:
                group.end_processes()
        await super()._end(lost)
        if self.survivors:
            return
        for group in groups:
            group.end_processes()
        if ends:
            # A scheduler that does not answer must not block the driver.
            await asyncio.wait(ends, timeout=_END_SECONDS)


def connect(address: Address, key: bytes, process: Introduction) -> None:
    """Run a rank process: connect to the driver, receive a rank, and serve the driver's calls as this rank."""
    sock = socket.create_connection(address)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    introduce(sock, key, process._asdict())
    assigned = receive_json(sock)
    os.environ.update(assigned["environment"])
    # Slurm and Ray may give GPUs also to ranks for the CPU.
    chosen_device.hide_gpus()
    # Gloo would choose an interface by the host name. The interface to the driver is one that other nodes reach.
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_of(assigned["address"])):
        os.environ["GLOO_SOCKET_IFNAME"] = name
    # Redirect the descriptors themselves, so that output of C libraries goes to the log too.
    output = os.open(assigned["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(output, stream)
    # The kernel sends SIGURG only to the owner of a socket. See `ask_for_stacks`.
    fcntl.fcntl(sock, fcntl.F_SETOWN, os.getpid())
    faulthandler.register(signal.SIGURG, all_threads=True)
    served = sock
    if assigned["relays"]:
        relay.start(address, key, assigned["address"], assigned["relays"])
    if assigned["is_relayed"]:
        served = _join_relay(receive_json(sock), key, assigned["rank"])
        Inbox(sock)  # notices still come on the direct connection
    # Each rank has its own folder for temporary files, removed with the rank.
    folder = PrivateFolder()
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder.path)
    try:
        serve(served, rendezvous.listen(assigned["address"]) if os.environ["RANK"] == "0" else 0)
    finally:
        folder.remove()


def _cut_off(handle: RemoteHandle) -> None:
    """Record the end of a process, and close its connections."""
    handle.note_end()
    # A node that lost power does not end its connection, so the driver does.
    handle.direct.cut()
    handle.connection.cut()


def _notice_silence(connected: socket.socket) -> None:
    """Turn on TCP keepalive: the kernel closes the connection after 30 s of silence, for example after a power loss.

    The other node's kernel answers the keepalive probes, so a busy process does not count as silent.
    """
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _SILENT_SECONDS // 2),
        (socket.TCP_KEEPINTVL, _SILENT_SECONDS // 6),
        (socket.TCP_KEEPCNT, 3),
        # For data that the node does not acknowledge, or a stopped rank does not read. Linux would try for 15 minutes.
        (socket.TCP_USER_TIMEOUT, 1000 * _UNREAD_SECONDS),
    ):
        connected.setsockopt(socket.IPPROTO_TCP, option, value)


def _join_relay(address: Mapping[str, Any], key: bytes, rank: int) -> socket.socket:
    """Connect this rank to the relay of its node. `address` has the relay's host and port."""
    connected = socket.create_connection((address["host"], address["port"]))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    introduce(connected, key, {"rank": rank})
    return connected


def interface_of(address: str) -> str | None:
    """Return the name of the network interface whose first IPv4 address is `address`; None: there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                # struct ifreq has 16 bytes for the name, with a final zero, then a sockaddr_in. Its
                # bytes 20 to 23 are the address.
                request = struct.pack("256s", name.encode()[:15])
                if socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFADDR, request)[20:24]) == address:
                    return name
    return None


def reached_at(connections: Sequence[tuple[str, str]]) -> list[str]:
    """Return, for each rank, an address at which ranks of other nodes reach it.

    `connections` has, for each rank, its own address and the driver's on their connection. For a rank on the driver's
    machine both may be the loopback address. The result is then the address at which ranks of other machines reach the
    driver, if there are such ranks.
    """
    arrived = next((own for theirs, own in connections if theirs != own), None)
    return [(arrived or own) if theirs == own else theirs for theirs, own in connections]
