"""Containers of agents' attempts: choice of the node, early start, leases."""

from __future__ import annotations

import asyncio
import base64
import os
import statistics
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from typing import Any

from megarl.cluster.agents.agent_link import AgentLink
from megarl.config.sections.rollout import ANY_ADDRESS, AgentConfig
from megarl.sandbox.containers.container import LEASE_SECONDS, ContainerError, ContainerSettings, Executed
from megarl.sandbox.containers.host import ContainerHost
from megarl.sandbox.containers.requests import DEFAULT_DISK_BYTES, Limits
from megarl.serving.agent.node_memory import MachineMemory, RunMemory
from megarl.types import MegarlError

_RENEW_SECONDS = 10.0
"""Seconds between two renewals of all leases."""
_TRIES = 2
"""Maximum number of starts of a container. The second start is on another node, if there is one."""
_NUM_AHEAD = 4
"""Containers started ahead of the next attempts, so that these do not wait for a start."""
_NUM_STARTS = 8
"""Number of a node's newest start times compared with those of other nodes."""
_SLOW_FACTOR, _SLOW_SECONDS = 3.0, 1.0
"""A node is slow if its median start takes both this many times as long as elsewhere, and this many seconds longer."""

_NUMBERS = count(1)
"""Numbers in container names. All sources of a mixture draw from them, because they share the nodes."""
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "localhost": "127.0.0.1", "::": "::1"}
"""For each host that an endpoint listens on: the host to which programs on the driver's machine connect."""

Request = Callable[[str, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]


@dataclass(slots=True, eq=False)
class Node:
    """A machine with containers. `request` calls its container host. `address` is the endpoint's, seen from the
    machine.
    """

    name: str
    request: Request
    address: tuple[str, int]
    memory: MachineMemory
    names: set[str] = field(default_factory=set)
    """Names of the node's living containers."""
    start_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_STARTS))

    async def call_host(self, verb: str, **fields: Any) -> Mapping[str, Any]:
        """Call the node's container host. Raises ContainerError."""
        try:
            answer = await self.request(verb, fields)
        except (MegarlError, OSError) as error:
            raise ContainerError(f"{type(error).__name__}: {error}") from error
        if "error" in answer:
            raise ContainerError(f"{answer['error']} (node {self.name})")
        return answer


class AttemptContainer:
    """A running container of one attempt."""

    def __init__(
        self, node: Node, name: str, url: str, seconds_to_start: float, seconds_running: float | None = None
    ) -> None:
        self.node, self.name = node, name
        self.url, self.seconds_to_start = url, seconds_to_start
        self.seconds_running = seconds_running
        """Seconds since the program of an adopted container started, 0 if it has ended; None: the container is new."""
        self.is_leaked = False
        """Whether the container could not be ended. It ends when its lease expires."""

    async def execute(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: bytes = b"",
        folder: str | None = None,
        label: str = "",
    ) -> Executed:
        """Run a program to its end, then kill all other programs of the container. Cancelling kills the program too.

        A later driver can `join` the program by its label. Raises ContainerError.
        """
        return await self._await_end(
            "execute",
            command=list(command),
            environment=dict(environment),
            stdin=base64.b64encode(stdin).decode(),
            folder=folder,
            label=label,
        )

    async def join(self, label: str) -> Executed:
        return await self._await_end("join", label=label)

    async def _await_end(self, verb: str, **fields: Any) -> Executed:
        """Ask the node to run (`execute`) or join (`join`) a program, and return its end."""
        try:
            answer = await self.node.call_host(verb, name=self.name, **fields)
        except asyncio.CancelledError:
            # Cancelling this call does not reach an agent on another node.
            with suppress(ContainerError):
                await self.node.call_host("cancel", name=self.name)
            raise
        return Executed(**answer)

    async def put(self, folder: str, files: Mapping[str, tuple[int, bytes]]) -> None:
        """Replace a folder by `files`: relative path to (mode, content). Raises ContainerError."""
        encoded_files = {path: (mode, base64.b64encode(content).decode()) for path, (mode, content) in files.items()}
        await self.node.call_host("put", name=self.name, folder=folder, files=encoded_files)

    async def get(self, path: str, max_bytes: int) -> bytes:
        """Return the content of a file. Raises ContainerError if it is missing or longer than `max_bytes`."""
        answer = await self.node.call_host("get", name=self.name, path=path, max_bytes=max_bytes)
        return base64.b64decode(answer["content"])


class Containers:
    """Containers of attempts, spread over nodes by free memory. Call `start` first, and `close` at the end.

    `agents` returns the agents of the run's nodes. `address` is the endpoint's on the driver's machine. `memory` is the
    memory of the machines, shared with the run's other sources; None: there are none.
    """

    def __init__(
        self,
        config: AgentConfig,
        address: tuple[str, int],
        *,
        agents: Callable[[], Sequence[AgentLink]] = tuple,
        notify: Callable[[str], object] = lambda text: None,
        memory: RunMemory | None = None,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        self._config, self._address = config, address
        self._agents, self._notify = agents, notify
        self._lease_seconds = config.outlive_seconds or lease_seconds
        self._host = ContainerHost()
        host, port = address
        self._memory = memory or RunMemory()
        address_on_driver = _LOOPBACK.get(host, host), port
        self._driver = Node("driver", self._host.request, address_on_driver, self._memory.open_account())
        self._nodes: dict[AgentLink, Node] = {}
        # This limits containers; `AgentRunner.run_slots` limits programs running in them.
        self._start_limit = asyncio.Semaphore(config.max_processes + _NUM_AHEAD)
        self._ending_tasks: set[asyncio.Task[None]] = set()
        """Tasks that end containers of an earlier driver."""
        self.renew_task: asyncio.Task[None] | None = None
        self._slow_nodes: set[str] = set()
        self._is_wait_reported = False

    async def start(self) -> None:
        self.renew_task = asyncio.create_task(self._renew())

    async def close(self) -> None:
        """End all containers on the driver's machine. Others end with their attempts or leases."""
        if self.renew_task is not None:
            self.renew_task.cancel()
            await asyncio.wait({self.renew_task})
        await asyncio.gather(*self._ending_tasks)
        await self._host.close()

    @property
    def nodes(self) -> list[Node]:
        """The nodes with living agents, or only the driver's machine (rollout.agent.nodes)."""
        if self._config.nodes == "driver":
            return [self._driver]
        living_agents = [agent for agent in self._agents() if not agent.is_lost]
        # Reuse known `Node`s: they hold the names and start times of their containers.
        self._nodes = {agent: self._nodes.get(agent) or self._make_node(agent) for agent in living_agents}
        return list(self._nodes.values())

    @property
    def num_living(self) -> int:
        return self._memory.num_containers

    @asynccontextmanager
    async def start_container(
        self, attempt: str, image: str | None = None, limits: Mapping[str, float] | None = None
    ) -> AsyncIterator[AttemptContainer]:
        """Start a container for an attempt, and end it afterwards. Raises ContainerError.

        `image` and `limits` (fields of `Limits`) replace the recipe's.
        """
        async with self._start_limit:
            node, name, answer = await self._start_on_best_node(attempt, image or self._config.image, limits or {})
            container = AttemptContainer(node, name, answer["url"], answer["seconds"])
            try:
                yield container
            finally:
                container.is_leaked = not await self._stop(node, name)

    async def _start_on_best_node(
        self, attempt: str, image: str | None, limits: Mapping[str, Any]
    ) -> tuple[Node, str, Mapping[str, Any]]:
        """Start a container on the node with the most free memory. Raises ContainerError.

        Returns the node, the container's name, and the answer of the node's container host.
        """
        failure = ContainerError("ContainerError: the run has no node left that can start containers")
        failed_nodes: set[Node] = set()
        memory_bytes = self._needed_memory_bytes(limits)
        for _ in range(_TRIES):
            node = await self._choose_node(failed_nodes, memory_bytes)
            if node is None:
                break
            failed_nodes.add(node)
            # Unique on every node, also after a restart of the driver. podman and docker refuse blanks.
            name = f"megarl-{os.getpid()}-{attempt.replace(' ', '-')}-{next(_NUMBERS)}"
            # Reserve before the start, so that attempts starting together choose different nodes.
            self._reserve(node, name, memory_bytes)
            start_time = time.monotonic()
            try:
                answer = await node.call_host("start", settings=self._make_settings(name, node, image, limits))
            except ContainerError as error:
                await self._release(node, name)
                failure = error
                continue
            # A cancelled request may have started the container. Its lease would be renewed until the run ends.
            except BaseException:
                await self._stop(node, name)
                raise
            node.start_seconds.append(time.monotonic() - start_time)
            self._report_slow_node(node)
            return node, name, answer
        raise failure

    def _needed_memory_bytes(self, limits: Mapping[str, Any]) -> int:
        """Return the bytes that a container may use: its programs, and new files in memory."""
        needed_bytes = limits.get("memory_bytes", _gib(self._config.memory_gib)) or 0
        if self._config.has_layer:
            needed_bytes += limits.get("disk_bytes", _gib(self._config.disk_gib)) or DEFAULT_DISK_BYTES
        return int(needed_bytes)

    async def _choose_node(self, failed_nodes: Collection[Node], memory_bytes: int) -> Node | None:
        """Wait until a node has room, and return the one with the most free memory. None: no node is left.

        Nodes in `failed_nodes` are chosen only if the run has no other node.
        """
        while True:
            # Better wait for another node's memory than fail on the same node again.
            nodes = [node for node in self.nodes if node not in failed_nodes] or self.nodes
            if memory_bytes:
                await asyncio.gather(
                    *(self._renew_leases_on(node) for node in nodes if node.memory.capacity_bytes is None)
                )
            candidates = [node for node in nodes if node.memory.has_room(memory_bytes)]
            if candidates or not nodes:
                break
            self._report_wait(memory_bytes)
            await self._memory.wait_for_change()
        # Nodes on one machine have equal memory: then take the one with fewer containers.
        return max(candidates, key=lambda node: (node.memory.bytes_per_container, -len(node.names)), default=None)

    def _report_wait(self, memory_bytes: int) -> None:
        if not self._is_wait_reported:
            self._is_wait_reported = True
            self._notify(
                f"containers wait for memory: {self.num_living} live, and no node has {memory_bytes / 2**30:.3g} GiB "
                "left besides their limits; one starts when another ends. Set rollout.agent.memory_gib and disk_gib to "
                "what an attempt needs (disk_gib counts with sandbox and apptainer, by default 4)"
            )

    def _reserve(self, node: Node, name: str, memory_bytes: int) -> None:
        node.names.add(name)
        node.memory.reserved_bytes[name] = memory_bytes

    async def _release(self, node: Node, name: str) -> None:
        node.names.discard(name)
        node.memory.reserved_bytes.pop(name, None)
        await self._memory.notify_change()

    def end_earlier(self, containers: Sequence[tuple[str, str]]) -> None:
        """Begin to end an earlier driver's containers, given as (node, name). On lost nodes they have already ended."""
        nodes = {node.name: node for node in self.nodes}
        for node_name, name in containers:
            if node_name in nodes:
                task = asyncio.create_task(self._end_earlier(nodes[node_name], name))
                self._ending_tasks.add(task)
                task.add_done_callback(self._ending_tasks.discard)

    async def _end_earlier(self, node: Node, name: str) -> None:
        # On a lost node the container ends when its lease expires.
        with suppress(ContainerError):
            await node.call_host("end_earlier", name=name)

    @asynccontextmanager
    async def adopt(self, node_name: str, name: str) -> AsyncIterator[AttemptContainer]:
        """Take over a container of an earlier driver, and end it afterwards. Raises ContainerError if it has ended."""
        async with self._start_limit:
            node = next((node for node in self.nodes if node.name == node_name), None)
            if node is None:
                raise ContainerError(f"ContainerLost: the run has no node {node_name}")
            try:
                answer = await node.call_host("adopt", settings=self._make_settings(name, node, self._config.image, {}))
            except ContainerError:
                raise
            # As in `_start_on_best_node`: a cancelled request may have adopted the container.
            except BaseException:
                await self._stop(node, name)
                raise
            self._reserve(node, name, self._needed_memory_bytes({}))
            container = AttemptContainer(node, name, answer["url"], 0.0, answer["seconds_running"])
            try:
                yield container
            finally:
                container.is_leaked = not await self._stop(node, name)

    def _make_settings(
        self, name: str, node: Node, image: str | None, task_limits: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the JSON settings of a container: the recipe's, with a Harbor task's limits in place of its limits."""
        config = self._config
        limits = Limits(
            processes=config.processes,
            memory_bytes=_gib(config.memory_gib),
            disk_bytes=_gib(config.disk_gib),
            output_bytes=None if config.output_mib is None else config.output_mib << 20,
        )
        settings = ContainerSettings(
            kind=config.sandbox,
            name=name,
            address=node.address,
            image=image,
            folders=config.folders,
            network=config.reach,
            limits=replace(limits, **task_limits),
            lease_seconds=self._lease_seconds,
            outlives_host=config.outlive_seconds is not None,
        )
        return asdict(settings)

    async def _stop(self, node: Node, name: str) -> bool:
        """End a container. Returns whether it has ended. On a lost node it ends with the node's agent."""
        try:
            await node.call_host("stop", name=name)
        except ContainerError:
            return False
        finally:
            await self._release(node, name)
        return True

    async def _renew(self) -> None:
        while True:
            await asyncio.gather(*(self._renew_leases_on(node) for node in self.nodes))
            await asyncio.sleep(min(_RENEW_SECONDS, self._lease_seconds / 6))

    async def _renew_leases_on(self, node: Node) -> None:
        # One lost node must not stop the renewals on the others.
        with suppress(ContainerError):
            answer = await node.call_host("renew")
            node.memory = self._memory.account_of(answer["machine"], node.memory)
            node.memory.record_free_bytes(answer["free_bytes"])
            await self._memory.notify_change()

    def _make_node(self, agent: AgentLink) -> Node:
        """Return the node of a node's agent, with the address at which programs there reach the endpoint."""

        async def ask_agent(verb: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
            return await agent.request("container", verb=verb, fields=dict(fields))

        host, port = self._address
        memory = self._memory.open_account()
        if agent.addresses is None:
            return Node(agent.node, ask_agent, self._driver.address, memory)
        # An address for all interfaces, such as 0.0.0.0, cannot be reached from another node.
        return Node(agent.node, ask_agent, (agent.addresses[1] if host in ANY_ADDRESS else host, port), memory)

    def _report_slow_node(self, node: Node) -> None:
        """Warn once about a node with a much longer median start than the others."""
        peer_start_seconds = [
            node_seconds for peer in self.nodes if peer is not node for node_seconds in peer.start_seconds
        ]
        if (
            node.name in self._slow_nodes
            or len(node.start_seconds) < _NUM_STARTS
            or len(peer_start_seconds) < _NUM_STARTS
        ):
            return
        # Medians, because a single slow start says nothing about a node.
        node_seconds, usual_seconds = statistics.median(node.start_seconds), statistics.median(peer_start_seconds)
        if node_seconds > max(_SLOW_FACTOR * usual_seconds, usual_seconds + _SLOW_SECONDS):
            self._slow_nodes.add(node.name)
            self._notify(
                f"node {node.name} starts containers slowly: {node_seconds:.1f} s, other nodes take "
                f"{usual_seconds:.1f} s (environment/container_start_seconds); look at its load and its disk"
            )


def _gib(number: float | None) -> int | None:
    return None if number is None else int(number * (1 << 30))
