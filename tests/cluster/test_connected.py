"""Processes that connect back: who does not know the key neither gets in nor holds up who does."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from megarl.cluster.connected import Address, ConnectedGroup, interface_of, reached_at
from megarl.cluster.handshake import introduce
from megarl.cluster.topology import Introduction
from megarl.types import PeerLostError
from tests.cluster.lateness import see_who_is_late

pytestmark = pytest.mark.distributed

_PROCESS = """
import sys
from megarl.processes.process_tree import die_with
from megarl.cluster.connected import connect
from megarl.cluster.topology import Introduction
host, port, key, turn, parent = sys.argv[1:]
die_with(int(parent))
connect((host, int(port)), bytes.fromhex(key), Introduction(int(turn), "node", "localhost"))
"""


class SpawnedGroup(ConnectedGroup):
    """Processes of this machine that connect back as those of a scheduler do, among strangers.

    Some of these are ranks of another start: they know the run's key, not this start's.
    """

    def __init__(self, world_size: int, strangers: list[bytes]) -> None:
        super().__init__(world_size)
        self.strangers = strangers
        self.processes: list[asyncio.subprocess.Process] = []
        self.connections: list[socket.socket] = []

    def host(self) -> str:
        return "127.0.0.1"

    async def launch(self, log_folder: Path, environment: Mapping[str, str], address: Address, key: bytes) -> None:
        for words in self.strangers:
            self.connections.append(socket.create_connection(address))
            self.connections[-1].sendall(words)
        of_another_start = [(turn, self.part.key) for turn in range(self.world_size if self.strangers else 0)]
        for turn, known in [*of_another_start, *((turn, key) for turn in range(self.world_size))]:
            arguments = address[0], str(address[1]), known.hex(), str(turn), str(os.getpid())
            self.processes.append(
                await asyncio.create_subprocess_exec(
                    sys.executable, "-c", _PROCESS, *arguments, env={**os.environ, **environment}
                )
            )

    async def await_end(self) -> str:
        await asyncio.gather(*(process.wait() for process in self.processes))
        return "the processes ended"

    def end_processes(self) -> None:
        for process in self.processes:
            if process.returncode is None:
                process.kill()
        for connection in self.connections:
            connection.close()


def plain(fields: dict[str, object]) -> bytes:
    return json.dumps(fields).encode()


async def test_strangers_neither_delay_nor_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    pickled = pickle.dumps(Introduction(0, "node", "localhost"))
    words = [b""] * 40 + [b"\0" * 64 + pickled, b"\xff" * 500, len(pickled).to_bytes(4, "big") + pickled]

    began = time.monotonic()
    group = await SpawnedGroup(2, strangers=words).start("probe:Probe", {}, log_folder=tmp_path)
    try:
        await group.call("join_gloo")
        assert await group.call("product", 2) == [(0, 2), (1, 4)]
        addresses = [address for of_rank in await group.call("listening") for address in of_rank]
        assert addresses and all(address.startswith("0100007F:") for address in addresses)
        folders = [Path(path) for path in await group.call("temporary")]
        assert len(set(folders)) == 2 and all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders)
    finally:
        await group.close()
    assert not any(folder.exists() for folder in folders)
    assert time.monotonic() - began < 60  # one after the other, forty silent strangers would take 400 s


async def test_who_is_late_is_told_with_the_stacks_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    group = await SpawnedGroup(3, strangers=[]).start("probe:Probe", {}, log_folder=tmp_path)
    try:
        await see_who_is_late(group, 1.0)
    finally:
        await group.close()


def test_a_driver_that_does_not_know_the_key_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", _PROCESS, "127.0.0.1", str(server.getsockname()[1]), "00" * 32, "0"]
        with subprocess.Popen([*command, str(os.getpid())], stderr=subprocess.PIPE, text=True) as process:
            connected, _ = server.accept()
            with connected:
                connected.sendall(bytes(32))
                connected.recv(64)
                connected.sendall(bytes(32))
                assert process.stderr is not None
                assert "does not know this run's secret key" in process.stderr.read()
                assert connected.recv(1) == b""  # it said nothing of itself


class PlayedGroup(ConnectedGroup):
    """Two processes played by this one: they introduce themselves, and receive nothing.

    `leaves`: the first leaves before the second comes. `ends`: the launcher reports the end of both as soon as they are
    known.
    """

    def __init__(self, *, leaves: bool = False, ends: bool = False) -> None:
        super().__init__(2)
        self.leaves, self.ends = leaves, ends
        self.connections: list[socket.socket] = []
        self.is_over = asyncio.Event()

    def host(self) -> str:
        return "127.0.0.1"

    async def launch(self, log_folder: Path, environment: Mapping[str, str], address: Address, key: bytes) -> None:
        def play() -> None:
            for turn in range(self.world_size):
                connected = socket.create_connection(address)
                self.connections.append(connected)
                introduce(connected, key, Introduction(turn, "node", "localhost")._asdict())
                if self.leaves and turn == 0:
                    connected.close()

        self.playing = asyncio.create_task(asyncio.to_thread(play))

    async def await_end(self) -> str:
        while self.ends and not self._remote_handles:
            await asyncio.sleep(0)
        if not self.ends:
            await self.is_over.wait()
        return "the processes ended"

    def end_processes(self) -> None:
        self.is_over.set()
        for connection in self.connections:
            connection.close()


async def test_a_process_that_leaves_before_it_has_its_rank_is_named_by_its_node(tmp_path: Path) -> None:
    with pytest.raises(PeerLostError, match="a process on node node was lost before it received its rank"):
        await PlayedGroup(leaves=True).start("probe:Probe", {}, log_folder=tmp_path)


async def test_processes_that_end_while_their_connections_are_opened_are_lost(tmp_path: Path) -> None:
    with pytest.raises(PeerLostError, match=r"ended or lost its connection|was lost before it received its rank"):
        await PlayedGroup(ends=True).start("probe:Probe", {}, log_folder=tmp_path)


async def test_too_few_processes_are_told(tmp_path: Path) -> None:
    class Ended(SpawnedGroup):
        async def launch(self, *_: object) -> None:
            self.processes.append(await asyncio.create_subprocess_exec("true"))

    with pytest.raises(PeerLostError, match="the processes ended before all ranks connected"):
        await Ended(2, strangers=[]).start("probe:Probe", {}, log_folder=tmp_path)


def test_the_address_of_a_rank_is_the_one_that_other_nodes_reach() -> None:
    loopback, driver, others = ("127.0.0.1", "127.0.0.1"), "10.0.0.1", ["10.0.0.2", "10.0.0.3"]
    assert reached_at([loopback, *((other, driver) for other in others)]) == [driver, *others]
    assert reached_at([(driver, driver), (others[0], driver)]) == [driver, others[0]]
    assert reached_at([loopback, loopback]) == ["127.0.0.1"] * 2


def test_an_interface_is_known_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.7") is None
