"""Files in an agent's memory: copies of the training state that outlive a node's ranks.

A rank creates a file without a name (memfd_create) and fills it. The agent opens it too. The kernel frees the file when
both have ended, even after a kill. Agents send each other files when nodes leave a run.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import secrets
import socket
import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from megarl.cluster.agents.handshake import accept_peers_with_key, introduce
from megarl.types import PeerLostError

_PART_BYTES = 1 << 24
"""Bytes sent, received or checked at a time."""
_OFFER_SECONDS = 600.0
"""Seconds for another agent to fetch an offer. Then the offer ends."""


@dataclass(frozen=True, slots=True)
class _MemoryFile:
    """An open file in memory, its bytes, and its CRC-32 when it was filled."""

    descriptor: int
    size: int
    checksum: int

    @property
    def json_values(self) -> dict[str, Any]:
        """JSON values that a process of this node needs to open the file."""
        return {"path": f"/proc/{os.getpid()}/fd/{self.descriptor}", "size": self.size, "checksum": self.checksum}

    def is_intact(self) -> bool:
        """Return whether the contents still match the checksum. Reads the whole file."""
        checksum = 0
        if self.size:
            with mmap.mmap(self.descriptor, self.size, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
                for offset in range(0, self.size, _PART_BYTES):
                    checksum = zlib.crc32(view[offset : offset + _PART_BYTES], checksum)
        return checksum == self.checksum


class MemoryFiles:
    """Files of one agent by name. Most methods serve requests of the driver."""

    def __init__(self) -> None:
        self._files: dict[str, _MemoryFile] = {}

    async def hold(self, files: Mapping[str, Mapping[str, Any]]) -> None:
        """Open files of this node's ranks, by name, with `path`, `size` and `checksum`. Raises OSError."""
        for name, fields in files.items():
            descriptor = os.open(fields["path"], os.O_RDWR | os.O_CLOEXEC)
            self._add_file(name, _MemoryFile(descriptor, fields["size"], fields["checksum"]))

    async def list_files(self, checks: bool) -> dict[str, Any]:
        """Return `files` as `hold` takes them, and the names of `damaged` files.

        With `checks`, files with another checksum count as damaged and are deleted. Without, no file is checked.
        """
        damaged_names: list[str] = []
        if checks:
            files = list(self._files.items())
            # crc32 releases Python's lock, so the agent serves its ranks meanwhile.
            are_intact = await asyncio.gather(*(asyncio.to_thread(file.is_intact) for _, file in files))
            damaged_names = [name for (name, _), is_intact in zip(files, are_intact, strict=True) if not is_intact]
            await self.drop(damaged_names)
        return {"files": {name: file.json_values for name, file in self._files.items()}, "damaged": damaged_names}

    async def drop(self, names: Collection[str]) -> None:
        """Close the files with these names. Ranks that opened a file can still use it. Ignores unknown names."""
        for name in names:
            if (file := self._files.pop(name, None)) is not None:
                os.close(file.descriptor)

    async def keep_only(self, prefix: str) -> None:
        await self.drop([name for name in self._files if not name.startswith(prefix)])

    async def offer(self, names: Sequence[str], address: str) -> dict[str, Any]:
        """Offer files to one other agent, at this node's `address`. Returns the arguments of its `fetch`."""
        key = secrets.token_bytes(32)
        server = socket.create_server((address, 0))
        files = {name: self._files[name] for name in names}
        send_task = asyncio.create_task(_send_files(server, key, list(files.values())))
        # Retrieve the error: the other agent's `fetch` fails too, and reports it.
        send_task.add_done_callback(lambda task: task.cancelled() or task.exception())
        file_records = {name: {"size": file.size, "checksum": file.checksum} for name, file in files.items()}
        return {"address": list(server.getsockname()[:2]), "key": key.hex(), "files": file_records}

    async def fetch(self, address: Sequence[Any], key: str, files: Mapping[str, Mapping[str, Any]]) -> None:
        """Receive files offered by another agent. Raises OSError or PeerLostError."""
        received_files = await asyncio.to_thread(_receive_files, (address[0], address[1]), bytes.fromhex(key), files)
        for name, file in received_files.items():
            self._add_file(name, file)

    def _add_file(self, name: str, file: _MemoryFile) -> None:
        if (earlier_file := self._files.pop(name, None)) is not None:
            os.close(earlier_file.descriptor)
        self._files[name] = file


async def _send_files(server: socket.socket, key: bytes, files: Sequence[_MemoryFile]) -> None:
    """Wait for the one agent that fetches these files, and send them one after another."""
    receivers: dict[str, socket.socket] = {}
    with closing(server):
        server.setblocking(False)
        async with asyncio.timeout(_OFFER_SECONDS):
            await accept_peers_with_key(receivers, server, key, 1, lambda _: "receiver")
    with closing(receivers["receiver"]) as connected:
        connected.setblocking(True)
        for file in files:
            await asyncio.to_thread(_send_file, connected, file)


def _send_file(connected: socket.socket, file: _MemoryFile) -> None:
    num_sent = 0
    while num_sent < file.size:
        num_sent += os.sendfile(connected.fileno(), file.descriptor, num_sent, file.size - num_sent)


def _receive_files(
    address: tuple[str, int], key: bytes, files: Mapping[str, Mapping[str, Any]]
) -> dict[str, _MemoryFile]:
    """Fetch files from the agent that offers them at `address`. `files` has the size and checksum of each name."""
    received_files: dict[str, _MemoryFile] = {}
    try:
        with socket.create_connection(address) as connected:
            introduce(connected, key, {})
            for name, fields in files.items():
                descriptor, size = os.memfd_create("megarl copy"), int(fields["size"])
                received_files[name] = _MemoryFile(descriptor, size, fields["checksum"])
                os.truncate(descriptor, size)
                if size:
                    _receive_file(connected, descriptor, size)
    except BaseException:
        # Open files would take memory as long as the agent runs.
        for file in received_files.values():
            os.close(file.descriptor)
        raise
    return received_files


def _receive_file(connected: socket.socket, descriptor: int, size: int) -> None:
    with mmap.mmap(descriptor, size) as mapped, memoryview(mapped) as view:
        num_received = 0
        while num_received < size:
            num_bytes = connected.recv_into(view[num_received : num_received + _PART_BYTES])
            if not num_bytes:
                raise PeerLostError("the agent that sent copies of the state ended or lost its connection")
            num_received += num_bytes
