"""The run's own machine as its only node."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl.cluster.agents.nodes import Nodes
from megarl.cluster.agents.topology import Introduction, NodeKind
from megarl.processes.launcher import DEVNULL, LaunchedProgram, python_call

_EXIT_SECONDS = 10.0
"""Seconds for the agent to end its ranks and itself."""


class LocalAgent:
    """The agent's process, a child of the driver. It can import libraries before an event loop runs."""

    def __init__(self, environment: Mapping[str, str], imports: Sequence[str]) -> None:
        self.connected, agent_socket = socket.socketpair()
        settings = json.dumps({"environment": dict(environment), "imports": list(imports)})
        with agent_socket:
            self._program = LaunchedProgram(
                python_call("megarl.cluster.agents.agent:main", str(agent_socket.fileno()), str(os.getpid()), settings),
                stdin=DEVNULL,
                descriptors=[agent_socket.fileno()],
            )

    @property
    def pid(self) -> int:
        return self._program.pid

    def abandon(self) -> None:
        self.connected.close()
        self._program.kill()

    async def end(self) -> None:
        """Wait for the end of an agent without a connection, and of its ranks. Kill it after a time limit."""
        try:
            async with asyncio.timeout(_EXIT_SECONDS):
                await self._program.wait_for_end()
        finally:
            self._program.kill()


class LocalNodes(Nodes):
    """This machine as a node with any number of ranks."""

    is_unlimited = True

    def __init__(
        self,
        environment: Mapping[str, str],
        imports: Sequence[str],
        agent: LocalAgent | None = None,
        *,
        ranks_per_node: int = 1,
    ) -> None:
        """`agent` was started earlier with the same arguments; None: start one. `ranks_per_node` ranks are planned to
        share the cores. More may start.
        """
        super().__init__(NodeKind(0, 1, ranks_per_node), environment, imports)
        self._agent = agent

    async def start(self, log_folder: Path, timeout_seconds: float) -> None:
        agent = self._agent = self._agent or LocalAgent(self.environment, self.imports)
        name = socket.gethostname()
        self.agents = [await self._open_link(agent.connected, Introduction(0, name, name, pid=agent.pid))]

    async def replenish(self, num_nodes: int, timeout_seconds: float) -> None:
        if not self.num_living:
            await self.close()
            await self.start(Path(), timeout_seconds)

    async def close(self) -> None:
        """Close the connection to the agent, and wait for the end of its process."""
        for link in self.agents:
            link.cut()
        if self._agent is not None:
            self._agent.connected.close()
            with contextlib.suppress(TimeoutError):
                await self._agent.end()
            self._agent = None
