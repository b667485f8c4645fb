"""Nodes played by this machine: agents of interpreters of their own, which connect over TCP as those of a scheduler."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from megarl.cluster.agents.nodes import ConnectedNodes, Nodes
from megarl.cluster.agents.topology import NodeKind
from megarl.cluster.calls.worker_group import WorkerGroup
from tests.cluster.started import shared_imports

START_SECONDS = 300.0
AGENT = """
import os
import sys
from megarl.cluster.agents.agent import connect
from megarl.cluster.agents.topology import Introduction
from megarl.processes.process_tree import die_with
host, port, key, turn, parent = sys.argv[1:]
die_with(int(parent))
introduction = Introduction(int(turn), f"node{turn}", "127.0.0.1", pid=os.getpid())
connect((host, int(port)), bytes.fromhex(key), introduction)
"""
"""Program of an agent. Arguments: the driver's host and port, the key, the node's turn, the driver's process."""


class SpawnedNodes(ConnectedNodes):
    """Nodes `node0`, `node1` and so on. Each further agent is one of a further node.

    `strangers` connect first, each with some bytes. With strangers, agents of another start connect too: their key is
    another one.
    """

    def __init__(self, num_nodes: int, ranks_per_node: int = 1, *, strangers: Sequence[bytes] = ()) -> None:
        super().__init__(NodeKind(0, num_nodes, ranks_per_node), {}, ())
        self.strangers = strangers
        self.connections: list[socket.socket] = []
        self.processes: list[asyncio.subprocess.Process] = []
        """Agents by the turn of their node."""
        self.agents_of_another_start: list[asyncio.subprocess.Process] = []
        self._num_launched = 0
        """Number of agents launched last."""

    def host(self) -> str:
        return "127.0.0.1"

    async def launch(self, address: tuple[str, int], key: bytes) -> int:
        for words in self.strangers:
            self.connections.append(socket.create_connection(address))
            self.connections[-1].sendall(words)
        if self.strangers:
            for turn in range(self.kind.nodes):
                self.agents_of_another_start.append(await start_agent(address, b"\1" * len(key), turn))
        return await self.launch_further(self.kind.nodes, address, key)

    async def launch_further(self, num_nodes: int, address: tuple[str, int], key: bytes) -> int:
        for _ in range(num_nodes):
            self.processes.append(await start_agent(address, key, len(self.processes)))
        self._num_launched = num_nodes
        return num_nodes

    async def await_end(self) -> str:
        waiting = [asyncio.create_task(process.wait()) for process in self.processes[-self._num_launched :]]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        return "an agent ended"

    async def end_agents(self) -> None:
        processes = [*self.processes, *self.agents_of_another_start]
        for process in processes:
            if process.returncode is None:
                process.kill()
        await asyncio.gather(*(process.wait() for process in processes))
        for connection in self.connections:
            connection.close()


async def start_agent(address: tuple[str, int], key: bytes, turn: int) -> asyncio.subprocess.Process:
    """Start the agent of a node."""
    arguments = address[0], str(address[1]), key.hex(), str(turn), str(os.getpid())
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", AGENT, *arguments, stderr=asyncio.subprocess.DEVNULL
    )


@asynccontextmanager
async def spawned_nodes(num_nodes: int, ranks_per_node: int, logs: Path) -> AsyncIterator[SpawnedNodes]:
    """Nodes with agents, which end with the context."""
    nodes = SpawnedNodes(num_nodes, ranks_per_node)
    try:
        await nodes.start(logs, START_SECONDS)
        yield nodes
    finally:
        await nodes.close()


@asynccontextmanager
async def group_on(nodes: Nodes, logs: Path, num_ranks: int) -> AsyncIterator[WorkerGroup]:
    """A group of Probes on the first places of nodes, which ends with the context."""
    group = WorkerGroup(num_ranks, places=nodes.choose_places(num_ranks, (), on_one_node=False))
    try:
        yield await group.start("probe:Probe", {}, log_folder=logs, imports=shared_imports())
    finally:
        await group.close()
