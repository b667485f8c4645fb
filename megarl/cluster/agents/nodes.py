"""The nodes of a run. On each, a launcher starts an agent: on this machine, with srun, or with Ray."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

from megarl.cluster.agents.agent_link import AgentLink, RankPlace
from megarl.cluster.agents.handshake import accept_peers_with_key, pack_json
from megarl.cluster.agents.topology import Introduction, NodeKind, sort_by_switches
from megarl.cluster.ranks.rank_handle import log_tail
from megarl.types import ConfigError, PeerLostError

_SPARE_SECONDS = 20.0
"""Seconds to wait for spare nodes' agents, once as many as the run needs have connected."""
_END_SECONDS = 60.0
"""Seconds for the launcher (srun or Ray) to end all agents."""


class Nodes(ABC):
    """Nodes of one kind, numbered from 0. A node that replaces a lost one gets its number.

    The agents' fork servers have the variables `environment`, and import `imports` at the start.
    """

    def __init__(self, kind: NodeKind, environment: Mapping[str, str], imports: Sequence[str]) -> None:
        self.kind, self.environment, self.imports = kind, dict(environment), tuple(imports)
        self.agents: list[AgentLink] = []
        """Agents by node number. Some may be lost."""
        self.on_signal: Callable[[str], object] = lambda signal_name: None
        """Callback (signal name) for a stop signal to an agent."""

    @abstractmethod
    async def start(self, log_folder: Path, timeout_seconds: float) -> None:
        """Start the agents. The launcher logs to `log_folder`. Raises ConfigError or PeerLostError."""

    @abstractmethod
    async def replenish(self, num_nodes: int, timeout_seconds: float) -> None:
        """Start agents on further nodes, until at least `num_nodes` have one.

        Raises ConfigError if there are too few nodes, or PeerLostError if an agent does not connect in time.
        """

    @abstractmethod
    async def close(self) -> None:
        """End all agents and their ranks."""

    async def _open_link(self, connected: socket.socket, introduction: Introduction) -> AgentLink:
        """Open the connection to an agent. A stop signal goes to the `on_signal` set at that moment."""
        link = AgentLink(connected, introduction)
        await link.open()
        link.on_signal = lambda name: self.on_signal(name)
        return link

    async def replace_lost(self, timeout_seconds: float) -> None:
        """Replace lost nodes. Raises as `replenish`."""
        await self.replenish(self.kind.nodes, timeout_seconds)
        self.fill_gaps()

    @property
    def num_living(self) -> int:
        return sum(not agent.is_lost for agent in self.agents)

    def fill_gaps(self) -> None:
        """Give the numbers of lost nodes to spare nodes: the living nodes numbered from `kind.nodes` on."""
        for node_number in range(min(self.kind.nodes, len(self.agents))):
            spare_numbers = [
                spare_number
                for spare_number in range(self.kind.nodes, len(self.agents))
                if not self.agents[spare_number].is_lost
            ]
            if self.agents[node_number].is_lost and spare_numbers:
                self.agents[node_number], self.agents[spare_numbers[0]] = (
                    self.agents[spare_numbers[0]],
                    self.agents[node_number],
                )

    def free_places(self, used_places: Collection[tuple[int, int]]) -> Iterator[RankPlace]:
        """Yield the places of living nodes, node by node, except `used_places` (node number, local rank)."""
        for node_number, agent in enumerate(self.agents):
            if not agent.is_lost:
                local_ranks = count() if self.is_unlimited else range(self.kind.ranks_per_node)
                yield from (
                    RankPlace(agent, node_number, local_rank)
                    for local_rank in local_ranks
                    if (node_number, local_rank) not in used_places
                )

    is_unlimited = False
    """Whether a node has any number of places. True on this machine, because ranks may share a CPU."""

    def choose_places(
        self, num_ranks: int, used_places: Collection[tuple[int, int]], *, on_one_node: bool
    ) -> list[RankPlace]:
        """Return the first free places for a group of ranks. `on_one_node` prefers places of one node.

        Raises PeerLostError if there are too few.
        """
        places = list(islice(self.free_places(used_places), num_ranks))
        if len(places) < num_ranks:
            raise PeerLostError(
                f"{num_ranks} ranks need a place, and the {self.num_living} living nodes have {len(places)} free ones"
            )
        if on_one_node and len({place.node_number for place in places}) > 1:
            for node_number in range(len(self.agents)):
                node_places = [place for place in self.free_places(used_places) if place.node_number == node_number]
                if len(node_places) >= num_ranks:
                    return node_places[:num_ranks]
        return places


class ConnectedNodes(Nodes):
    """Nodes with agents that connect to the driver over TCP.

    Both ends of a connection prove a secret key (`handshake`). Nodes under one switch get consecutive numbers.
    """

    start_log = "agents.log"

    def __init__(self, kind: NodeKind, environment: Mapping[str, str], imports: Sequence[str]) -> None:
        super().__init__(kind, environment, imports)
        self._key = secrets.token_bytes(32)
        """Secret key, new at each start, so agents of an earlier start are refused."""
        self._log_folder, self._timeout_seconds = Path(), 0.0

    @abstractmethod
    def host(self) -> str:
        """Return the address or host name at which other nodes reach the driver."""

    @abstractmethod
    async def launch(self, address: tuple[str, int], key: bytes) -> int:
        """Start an agent on each node, which calls `agent.connect`. Return the number started."""

    @abstractmethod
    async def launch_further(self, num_nodes: int, address: tuple[str, int], key: bytes) -> int:
        """Start agents on `num_nodes` nodes without one, and return the number started.

        Raises ConfigError if there are too few such nodes.
        """

    @abstractmethod
    async def await_end(self) -> str:
        """Wait until a launched agent ends early. Return how it ended."""

    @abstractmethod
    async def end_agents(self) -> None:
        """End all agents with the launcher, and wait for their ends."""

    async def start(self, log_folder: Path, timeout_seconds: float) -> None:
        log_folder.mkdir(parents=True, exist_ok=True)
        self._log_folder, self._timeout_seconds = log_folder, timeout_seconds
        await self._launch_and_accept(self.launch, self.kind.nodes, timeout_seconds)

    async def replenish(self, num_nodes: int, timeout_seconds: float) -> None:
        num_missing = num_nodes - self.num_living
        if num_missing > 0:
            await self._launch_and_accept(partial(self.launch_further, num_missing), num_missing, timeout_seconds)

    async def close(self) -> None:
        for agent in self.agents:
            agent.cut()
        try:
            # A scheduler that does not answer must not block the driver.
            async with asyncio.timeout(_END_SECONDS):
                await self.end_agents()
        except TimeoutError:
            pass

    async def _launch_and_accept(
        self, launch: Callable[[tuple[str, int], bytes], Awaitable[int]], num_needed: int, timeout_seconds: float
    ) -> None:
        """Launch agents and accept their connections. Raises PeerLostError.

        `launch` (address, key) starts the agents and returns their number. At least `num_needed` must connect in time.
        """
        # Closed afterwards, so that agents that are late, or of another start, end at once.
        with socket.create_server(("", 0), backlog=4096) as server:
            server.setblocking(False)
            num_launched = await launch((self.host(), server.getsockname()[1]), self._key)
            connected = await self._accept_agents(server, num_needed, num_launched, timeout_seconds)
        for introduction in sort_by_switches(connected):
            await self._add_agent(connected[introduction], introduction)

    async def _add_agent(self, connected: socket.socket, introduction: Introduction) -> None:
        """Welcome an agent. Its node gets the number of a lost node, or else the next number."""
        welcome = {
            "folder": os.getcwd(),
            "path": sys.path,
            "environment": self.environment,
            "imports": list(self.imports),
        }
        link = await self._open_link(connected, introduction)
        link.send(pack_json(welcome))
        lost_number = next((node_number for node_number, agent in enumerate(self.agents) if agent.is_lost), None)
        if lost_number is None:
            self.agents.append(link)
        else:
            self.agents[lost_number] = link

    async def _accept_agents(
        self, server: socket.socket, num_needed: int, num_launched: int, timeout_seconds: float
    ) -> dict[Introduction, socket.socket]:
        """Accept the connections of launched agents, and return them by introduction.

        `num_needed` agents have `timeout_seconds`, the others a few seconds more. Raises PeerLostError.
        """
        connected: dict[Introduction, socket.socket] = {}
        # First wait for the agents that the run needs, then a shorter time for those of spare nodes.
        for num_required, seconds in ((num_needed, timeout_seconds), (num_launched, _SPARE_SECONDS)):
            if len(connected) >= num_required:
                continue
            meeting = accept_peers_with_key(connected, server, self._key, num_required, Introduction.from_plain)
            end_reason = await self._wait_for_agents(meeting, seconds)
            if len(connected) < num_needed:
                connected_nodes = ", ".join(introduction.node for introduction in connected) or "none"
                for agent_socket in connected.values():
                    agent_socket.close()
                raise PeerLostError(
                    f"{end_reason}: agents of {len(connected)} of {num_needed} nodes connected ({connected_nodes}); "
                    f"look at {self._log_folder} and at the nodes, or raise cluster.start_timeout_seconds\n"
                    + log_tail(self._log_folder / self.start_log)
                )
        return connected

    async def _wait_for_agents(self, meeting: Coroutine[Any, Any, None], seconds: float) -> str:
        """Wait for `meeting` at most `seconds`, or until a launched agent ends. Return why the wait ended."""
        meeting_task, end_task = asyncio.ensure_future(meeting), asyncio.ensure_future(self.await_end())
        try:
            await asyncio.wait([meeting_task, end_task], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if end_task.done():
                return end_task.result()
            if meeting_task.done() and (error := meeting_task.exception()) is not None:
                if not isinstance(error, OSError):
                    raise error
                return f"accepting connections failed: {error}"
            return f"no more agents connected within {seconds:g} s"
        finally:
            for task in (meeting_task, end_task):
                task.cancel()
            await asyncio.wait([meeting_task, end_task])


def too_few_nodes_error(num_nodes: int, num_possible: int) -> ConfigError:
    return ConfigError(
        f"cluster.nodes: {num_nodes} nodes are needed, but only {num_possible} start agents; ask for fewer ranks, or "
        "start a larger job"
    )
