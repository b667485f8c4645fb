"""Containers of agents' attempts on several nodes: where they start, what they reach, and what ends them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config.sections.rollout import AgentConfig
from megarl.platform.memory.host_memory import machine_bytes
from megarl.processes.process_tree import descendants
from megarl.sandbox.containers.container import ContainerError
from megarl.sandbox.containers.host import ContainerHost
from megarl.sandbox.containers.outliving import connect_to_container
from megarl.serving.agent.containers import AttemptContainer, Containers, Node, Request
from megarl.serving.agent.node_memory import RunMemory
from tests.child_processes import is_alive
from tests.cluster.containers_on_nodes import CALL, serve
from tests.cluster.spawned import spawned_nodes

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("worker_module", "nothing_left")]


async def wait_for_end(processes: list[int]) -> None:
    async with asyncio.timeout(60):
        while any(map(is_alive, processes)):
            await asyncio.sleep(0.05)


async def test_containers_run_on_all_nodes_and_end_with_agent_and_lease(tmp_path: Path) -> None:
    config = AgentConfig(command=("true",), sandbox="sandbox", nodes="all", max_processes=4, disk_gib=0.01)
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, spawned_nodes(2, 1, tmp_path) as nodes, AsyncExitStack() as stack:
        address = server.sockets[0].getsockname()
        containers = Containers(config, address, agents=lambda: nodes.agents, lease_seconds=6.0)
        await containers.start()
        stack.push_async_callback(containers.close)
        agents = [process.pid for process in nodes.processes]
        opened: list[AttemptContainer] = [
            await stack.enter_async_context(containers.start_container(f"draw 0.{n}")) for n in range(4)
        ]
        # podman and docker accept no other names.
        assert all(re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+", container.name) for container in opened)
        assert containers.num_living == 4
        # Both agents read the memory of one machine, so they take turns.
        assert Counter(container.node.name for container in opened) == {node.name: 2 for node in containers.nodes}
        started = {agent: list(descendants(agent)) for agent in agents}
        assert all(started.values())
        command = [sys.executable, "-c", CALL]
        answers = await asyncio.gather(*(container.execute(command, {}) for container in opened))
        assert {answer.stdout.partition(" 2")[0] for answer in answers} == {"got hello"}, answers
        running = [
            asyncio.create_task(container.execute(["sleep", "600"], {"PATH": "/usr/bin:/bin"})) for container in opened
        ]
        # Longer than the lease, which is renewed.
        await asyncio.sleep(8)
        assert not any(task.done() for task in running)

        # The end of an agent ends its containers, and those of the other go on.
        os.kill(agents[0], signal.SIGKILL)
        await wait_for_end(started[agents[0]])
        lost = [task for task, container in zip(running, opened, strict=True) if container.node.name == "node0"]
        for task in lost:
            with pytest.raises(ContainerError, match="PeerLostError"):
                await task
        living = [task for task in running if task not in lost]
        assert len(living) == 2 and not any(task.done() for task in living)
        async with containers.start_container("1.0") as later:
            assert later.node.name == "node1"
            assert (await later.execute(["echo", "on"], {"PATH": "/usr/bin:/bin"})).stdout == "on\n"

        # A driver that stands still renews no lease.
        assert containers.renew_task is not None
        containers.renew_task.cancel()
        for task in living:
            with pytest.raises(ContainerError, match="ContainerLost"):
                await asyncio.wait_for(task, 60)
        await wait_for_end(started[agents[1]])


async def test_a_container_waits_for_memory_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would end programs that together need more memory than a node has."""
    config = AgentConfig(command=("true",), sandbox="sandbox", memory_gib=0.005, disk_gib=0.005)
    # Room for two limits of memory.
    monkeypatch.setattr("megarl.sandbox.containers.host.available_bytes", lambda: int(0.025 * 2**30))
    notices: list[str] = []
    containers = Containers(config, ("127.0.0.1", 9), notify=notices.append)
    await containers.start()
    try:
        async with AsyncExitStack() as first, AsyncExitStack() as others:
            await first.enter_async_context(containers.start_container("0.0"))
            await others.enter_async_context(containers.start_container("0.1"))
            assert not notices
            third, fourth = (
                asyncio.create_task(others.enter_async_context(containers.start_container(f"0.{n}"))) for n in (2, 3)
            )
            assert not (await asyncio.wait({third, fourth}, timeout=1.0))[0] and containers.num_living == 2
            # Two containers wait, and the user reads of it once.
            [notice] = notices
            assert "2 live" in notice and "0.01 GiB" in notice
            fourth.cancel()
            await first.aclose()
            await third
            assert containers.num_living == 2
        # One that needs more than the node has would wait for ever.
        async with containers.start_container("0.3", limits={"memory_bytes": 2**50}):
            assert containers.num_living == 1
    finally:
        await containers.close()


class PlayedLink:
    """An agent whose container starts take `start_seconds` of a played clock."""

    is_lost, addresses = False, None

    def __init__(self, node: str, start_seconds: Iterator[float], clock: list[float]) -> None:
        self.node, self._start_seconds, self._clock = node, start_seconds, clock

    async def request(self, method: str, *, verb: str, fields: Any) -> dict[str, Any]:
        if verb == "start":
            self._clock[0] += next(self._start_seconds)
        # Equal memory: attempts start on all nodes in turn.
        return {"url": "http://endpoint", "seconds": 0.0, "machine": self.node, "free_bytes": 1 << 40}


@pytest.mark.parametrize(
    ("usual", "late", "is_named"),
    [(0.5, [2.0] * 8, True), (0.5, [0.5] * 7 + [60.0], False), (0.1, [0.9] * 8, False), (2.0, [4.0] * 8, False)],
    ids=["slow", "one slow start", "all within a second", "less than three times as slow"],
)
async def test_a_node_that_starts_containers_slowly_is_named_once(
    usual: float, late: list[float], is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, notices = [0.0], list[str]()
    monkeypatch.setattr("megarl.serving.agent.containers.time", SimpleNamespace(monotonic=lambda: clock[0]))
    links: Any = [PlayedLink("first", repeat(usual), clock), PlayedLink("second", chain(late, repeat(late[0])), clock)]
    config = AgentConfig(command=("true",), sandbox="sandbox", nodes="all")
    containers = Containers(config, ("127.0.0.1", 9), agents=lambda: links, notify=notices.append)
    async with AsyncExitStack() as stack:
        for number in range(18):
            await stack.enter_async_context(containers.start_container(f"0.{number}"))
        assert [len(node.names) for node in containers.nodes] == [9, 9]
    assert len(notices) == is_named
    assert all("second" in notice and f"{late[0]:.1f} s" in notice and f"{usual:.1f} s" in notice for notice in notices)


async def test_memory_is_reserved_once_a_container_for_all_sources_with_its_new_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """New files of a sandbox are held in memory. Sources of a mixture have an endpoint each, and the same nodes."""
    config = AgentConfig(command=("true",), sandbox="sandbox", memory_gib=0.01, disk_gib=0.02)
    # Room for two containers with their files, or for seven without.
    monkeypatch.setattr("megarl.sandbox.containers.host.available_bytes", lambda: int(0.07 * 2**30))
    memory = RunMemory()
    sources = [Containers(config, ("127.0.0.1", port), memory=memory) for port in (9, 10)]
    async with AsyncExitStack() as stack:
        for containers in sources:
            await containers.start()
            stack.push_async_callback(containers.close)
        opened = [await stack.enter_async_context(containers.start_container("0.0")) for containers in sources]
        # The hosts of nodes know containers by their names.
        assert opened[0].name != opened[1].name and [c.num_living for c in sources] == [2, 2]
        async with AsyncExitStack() as later:
            third = asyncio.create_task(later.enter_async_context(sources[0].start_container("0.1")))
            assert not (await asyncio.wait({third}, timeout=1.0))[0]
            third.cancel()
            await asyncio.wait({third})


async def test_a_start_that_failed_waits_for_another_node_instead_of_failing_there_again(tmp_path: Path) -> None:
    # A second container with this limit never fits on the node of the first, however much memory becomes free.
    config = AgentConfig(command=("true",), nodes="all", memory_gib=0.6 * machine_bytes() / 2**30)
    reported = asyncio.Event()
    async with spawned_nodes(2, 1, tmp_path) as nodes, AsyncExitStack() as stack:
        containers = Containers(
            config, ("127.0.0.1", 9), agents=lambda: nodes.agents, notify=lambda text: reported.set()
        )
        await containers.start()
        stack.push_async_callback(containers.close)
        broken, healthy = containers.nodes
        num_failed = 0

        def requests_of(node: Node) -> Request:
            """Play a machine of its own."""
            request = node.request

            async def make_request(verb: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
                nonlocal num_failed
                if verb == "start" and node is broken:
                    num_failed += 1
                    return {"error": "OSError: the disk of this node is full"}
                answer = await request(verb, fields)
                return {**answer, "machine": node.name} if verb == "renew" else answer

            return make_request

        for node in (broken, healthy):
            node.request = requests_of(node)
        async with AsyncExitStack() as first:
            assert (await first.enter_async_context(containers.start_container("0.0"))).node is healthy
            failed_before = num_failed
            second = asyncio.create_task(stack.enter_async_context(containers.start_container("0.1")))
            await asyncio.wait({second, asyncio.create_task(reported.wait())}, return_when=asyncio.FIRST_COMPLETED)
            assert not second.done() and num_failed == failed_before + 1
        assert (await asyncio.wait_for(second, 60)).node is healthy


async def test_a_driver_and_the_agent_of_its_machine_share_one_account(tmp_path: Path) -> None:
    """One source of a mixture runs its programs on the driver's machine, another one on all nodes."""
    # A second container with this limit never fits on the machine of the first, however much memory becomes free.
    limit_gib = 0.6 * machine_bytes() / 2**30
    reported, memory = asyncio.Event(), RunMemory()
    async with spawned_nodes(1, 1, tmp_path) as nodes, AsyncExitStack() as stack:
        on_driver, on_nodes = (
            Containers(
                AgentConfig(command=("true",), nodes=where, memory_gib=limit_gib),
                ("127.0.0.1", 9),
                agents=lambda: nodes.agents,
                notify=lambda text: reported.set(),
                memory=memory,
            )
            for where in ("driver", "all")
        )
        for containers in (on_driver, on_nodes):
            await containers.start()
            stack.push_async_callback(containers.close)
        async with AsyncExitStack() as first:
            await first.enter_async_context(on_driver.start_container("0.0"))
            second = asyncio.create_task(stack.enter_async_context(on_nodes.start_container("0.0")))
            await asyncio.wait({second, asyncio.create_task(reported.wait())}, return_when=asyncio.FIRST_COMPLETED)
            assert not second.done() and memory.num_containers == 1
        assert (await asyncio.wait_for(second, 60)).node.name == "node0" and memory.num_containers == 1


async def test_a_job_with_a_limit_has_an_account_of_its_own_on_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    host = ContainerHost()
    whole = await host.request("renew", {})
    monkeypatch.setattr("megarl.platform.memory.host_memory.cgroup_limits", lambda: [1 << 20])
    limited = await host.request("renew", {})
    assert limited["free_bytes"] == 1 << 20 < whole["free_bytes"]
    assert limited["machine"] != whole["machine"]


async def test_files_of_a_container_are_reserved_without_a_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files may grow to 4 GiB in memory."""
    config = AgentConfig(command=("true",), sandbox="sandbox")
    monkeypatch.setattr("megarl.sandbox.containers.host.available_bytes", lambda: 7 * 2**30)
    reported = asyncio.Event()
    containers = Containers(config, ("127.0.0.1", 9), notify=lambda text: reported.set())
    await containers.start()
    try:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(containers.start_container("0.0"))
            second = asyncio.create_task(stack.enter_async_context(containers.start_container("0.1")))
            await asyncio.wait({second, asyncio.create_task(reported.wait())}, return_when=asyncio.FIRST_COMPLETED)
            assert not second.done()
            second.cancel()
            await asyncio.wait({second})
    finally:
        await containers.close()


async def test_memory_of_an_earlier_driver_s_containers_is_used_after_their_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = AgentConfig(command=("true",), sandbox="sandbox", memory_gib=0.005, disk_gib=0.005)
    free_gib = 0.015
    monkeypatch.setattr("megarl.sandbox.containers.host.available_bytes", lambda: int(free_gib * 2**30))
    containers = Containers(config, ("127.0.0.1", 9))
    await containers.start()
    try:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(containers.start_container("0.0"))
            second = asyncio.create_task(stack.enter_async_context(containers.start_container("0.1")))
            assert not (await asyncio.wait({second}, timeout=1.0))[0]
            free_gib = 0.025
            await containers._renew_leases_on(containers.nodes[0])
            await asyncio.wait_for(second, 60)
    finally:
        await containers.close()


async def test_a_container_whose_program_cannot_go_on_is_ended_by_the_next_driver() -> None:
    config = AgentConfig(command=("true",), sandbox="sandbox", outlive_seconds=600.0)
    earlier, later = Containers(config, ("127.0.0.1", 9)), Containers(config, ("127.0.0.1", 9))
    await earlier.start()
    async with AsyncExitStack() as stack:
        container = await stack.enter_async_context(earlier.start_container("0.0"))
        program = asyncio.create_task(container.execute(["sleep", "600"], {"PATH": "/usr/bin:/bin"}))
        [held] = earlier._host._containers.values()
        # The host ends, and the container lives on.
        await earlier.close()
        with pytest.raises(ContainerError, match="ContainerLost"):
            await program
        connect_to_container(container.name).close()
        later.end_earlier([("driver", container.name), ("driver", "never-started"), ("lost-node", "unknown")])
        # `close` waits for the ends.
        await later.close()
        with pytest.raises(OSError):
            connect_to_container(container.name)
        assert held._launched_supervisor is not None
        await held._launched_supervisor.wait_for_end()
