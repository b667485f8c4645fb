"""Agents of several nodes: their connections, calls through them, and the errors that name ended and stopped ones."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest

from megarl.cluster.agents.agent import Agent, _Rank
from megarl.cluster.agents.agent_link import AgentLink, _pack_messages
from megarl.cluster.agents.handshake import introduce
from megarl.cluster.agents.topology import Introduction, find_addresses, find_interface
from megarl.cluster.calls import diagnosis, group_end
from megarl.cluster.calls.deadlines import Deadlines
from megarl.cluster.calls.rank_errors import RankFailedError
from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.cluster.ranks.messages import ANSWER, BATCH, PART, pack
from megarl.cluster.ranks.rank_handle import Answers, RankError, RankHandle
from megarl.cluster.ranks.stacks import is_complete
from megarl.platform.native_stacks import is_stopped
from megarl.types import DataError, PeerLostError
from tests.child_processes import is_alive
from tests.cluster.lateness import see_who_is_late
from tests.cluster.spawned import AGENT, START_SECONDS, SpawnedNodes, group_on, spawned_nodes

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("worker_module", "nothing_left")]

NOTICED_SECONDS = 30.0
"""Ranks that nobody ends sleep twice as long."""


@asynccontextmanager
async def started(num_ranks: int, logs: Path, per_node: int) -> AsyncIterator[tuple[WorkerGroup, SpawnedNodes]]:
    """A group of Probes on its nodes. None of its processes is left afterwards."""
    async with (
        spawned_nodes(-(-num_ranks // per_node), per_node, logs) as nodes,
        group_on(nodes, logs, num_ranks) as group,
    ):
        pids = await group.call("pid")
        yield group, nodes
    await wait_for_end(pids)


async def wait_for_end(pids: list[int]) -> None:
    async with asyncio.timeout(60):
        while any(map(is_alive, pids)):
            await asyncio.sleep(0.01)


async def stop(pid: int) -> None:
    """Stop a process. A busy machine takes a moment."""
    os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(60):
        while not is_stopped(pid):
            await asyncio.sleep(0.01)


async def test_strangers_neither_delay_nor_enter(tmp_path: Path) -> None:
    pickled = pickle.dumps(Introduction(0, "node0", "127.0.0.1"))
    words = [b""] * 40 + [b"\0" * 64 + pickled, b"\xff" * 500, len(pickled).to_bytes(4, "big") + pickled]
    nodes = SpawnedNodes(2, strangers=words)
    began = time.monotonic()
    try:
        await nodes.start(tmp_path, START_SECONDS)
        pids = [process.pid for process in nodes.processes]
        assert [agent.introduction.pid for agent in nodes.agents] == pids
        async with group_on(nodes, tmp_path, 2) as group:
            await group.call("join_gloo")
            assert await group.call("product", 2) == [(0, 2), (1, 4)]
            addresses = [address for of_rank in await group.call("listening") for address in of_rank]
            assert addresses and all(address.startswith("0100007F:") for address in addresses)
            folders = [Path(path) for path in await group.call("temporary")]
            assert len(set(folders)) == 2 and all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders)
        codes = [await process.wait() for process in nodes.agents_of_another_start]
        assert codes == [1, 1]
    finally:
        await nodes.close()
    # One after the other, forty silent strangers would take 400 s.
    assert time.monotonic() - began < 60


def test_a_driver_that_does_not_know_the_key_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        arguments = ["127.0.0.1", str(server.getsockname()[1]), "00" * 32, "0", str(os.getpid())]
        command = [sys.executable, "-c", AGENT, *arguments]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            connected, _ = server.accept()
            with connected:
                connected.sendall(bytes(32))
                connected.recv(64)
                connected.sendall(bytes(32))
                assert process.stderr is not None
                assert "does not know this run's secret key" in process.stderr.read()
                assert connected.recv(1) == b""  # it said nothing of itself


class PlayedNodes(SpawnedNodes):
    """Two nodes. This process plays the agents of the first `num_played`. With none, the launcher reports an end."""

    def __init__(self, num_played: int) -> None:
        super().__init__(2)
        self.num_played = num_played

    async def launch(self, address: tuple[str, int], key: bytes) -> int:
        def play() -> None:
            for turn in range(self.num_played):
                connected = socket.create_connection(address)
                self.connections.append(connected)
                introduce(connected, key, Introduction(turn, f"node{turn}", "127.0.0.1")._asdict())

        self.playing = asyncio.create_task(asyncio.to_thread(play))
        return 2

    async def await_end(self) -> str:
        if self.num_played == 0:
            return "the agents ended"
        return await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize(
    ("num_played", "cause"),
    [
        (0, r"the agents ended: agents of 0 of 2 nodes connected \(none\)"),
        (1, r"no more agents connected within 2 s: agents of 1 of 2 nodes connected \(node0\)"),
    ],
)
async def test_too_few_agents_are_told_with_the_nodes_that_came(tmp_path: Path, num_played: int, cause: str) -> None:
    # asyncio then refuses a server whose `accept` would stop the driver.
    asyncio.get_running_loop().set_debug(True)
    nodes = PlayedNodes(num_played)
    try:
        with pytest.raises(PeerLostError, match=cause):
            await nodes.start(tmp_path / "runs/logs", 2.0)
        await nodes.playing
    finally:
        await nodes.close()


async def test_a_meeting_that_stops_early_has_ended_before_its_server_is_closed() -> None:
    ended: list[str] = []
    tasks_before = asyncio.all_tasks()

    async def meet() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.append("meeting")

    assert await PlayedNodes(0)._wait_for_agents(meet(), 60) == "the agents ended"
    assert ended == ["meeting"] and asyncio.all_tasks() == tasks_before


async def test_an_agent_that_leaves_before_it_has_ranks_is_named_by_its_node(tmp_path: Path) -> None:
    nodes = PlayedNodes(2)
    try:
        await nodes.start(tmp_path, START_SECONDS)
        places = nodes.choose_places(2, (), on_one_node=False)
        nodes.connections[0].close()
        async with asyncio.timeout(20):
            while not nodes.agents[0].is_lost:
                await asyncio.sleep(0.01)
        began = time.monotonic()
        with pytest.raises(PeerLostError, match="the agent of node node0 has ended or lost its connection"):
            await WorkerGroup(1, places=places[:1]).start("probe:Probe", {}, log_folder=tmp_path)
        assert time.monotonic() - began < NOTICED_SECONDS
    finally:
        await nodes.close()


async def test_a_fork_that_the_agent_cannot_do_leaves_the_agent_and_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of the second rank is a folder."""
    # Limits of 10 s would be too near to what a busy machine takes.
    for name in ("_LEAVE_SECONDS", "_KILL_SECONDS"):
        monkeypatch.setattr(group_end, name, 120.0)
    (tmp_path / "rank_0001.log").mkdir()
    async with spawned_nodes(1, 2, tmp_path) as nodes:
        began = time.monotonic()
        with pytest.raises(IsADirectoryError) as caught:
            async with group_on(nodes, tmp_path, 2):
                pytest.fail("started")
        assert caught.value.filename == str(tmp_path / "rank_0001.log")
        assert caught.value.strerror == os.strerror(errno.EISDIR)
        assert time.monotonic() - began < NOTICED_SECONDS
        async with group_on(nodes, tmp_path / "logs", 2) as group:
            assert await group.call("product", 1) == [(0, 1), (1, 2)]


def test_the_address_of_a_rank_is_the_one_that_other_nodes_reach() -> None:
    loopback, driver, others = ("127.0.0.1", "127.0.0.1"), "10.0.0.1", ["10.0.0.2", "10.0.0.3"]
    assert find_addresses([loopback, *((other, driver) for other in others)]) == [driver, *others]
    assert find_addresses([(driver, driver), (others[0], driver)]) == [driver, others[0]]
    assert find_addresses([loopback, loopback]) == ["127.0.0.1"] * 2


def test_an_interface_is_known_by_its_address() -> None:
    assert find_interface("127.0.0.1") == "lo"
    assert find_interface("203.0.113.7") is None


async def test_calls_go_through_the_agents_of_their_nodes(tmp_path: Path) -> None:
    async with started(5, tmp_path, per_node=2) as (group, _):
        assert await group.call("product", 2) == [(rank, 2 * (rank + 1)) for rank in range(5)]
        assert [place[0] for place in group.topology] == ["node0", "node0", "node1", "node1", "node2"]
        variables = ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME"]
        expected = [["0", "2", "lo"], ["1", "2", "lo"]] * 2 + [["0", "1", "lo"]]
        assert await group.call("environment", variables) == expected
        assert await group.scatter("product", [5, 6, 7, 8, 9]) == [(0, 5), (1, 12), (2, 21), (3, 32), (4, 45)]
        large = np.arange(3_000_000)
        for rank, answer in enumerate(await group.scatter("reversed", [large, large[::3], large[:0], large, large])):
            assert len(answer) == [3_000_000, 1_000_000, 0, 3_000_000, 3_000_000][rank]
            assert not len(answer) or answer[-1] == rank
        # Calls to ranks of one node do not wait for each other.
        first, second = str(tmp_path / "first"), str(tmp_path / "second")
        await asyncio.gather(group.ask([0], "meet", [(first, second)]), group.ask([1], "meet", [(second, first)]))
        calls = [asyncio.create_task(group.ask([3, 1], "hear", [word, word])) for word in "abc"]
        assert [await call for call in calls][-1] == [["a", "b", "c"]] * 2


async def test_a_rank_that_answers_late_does_not_delay_its_neighbours_answer(tmp_path: Path) -> None:
    async with started(2, tmp_path, per_node=2) as (group, _):
        go = tmp_path / "go"
        waiting = asyncio.create_task(group.ask([0, 1], "wait_for", [str(tmp_path), str(go)]))
        async with asyncio.timeout(60):
            while [handle.rank for call in group._calls for handle in call.silent_handles()] != [1]:
                await asyncio.sleep(0.01)
        assert not waiting.done()
        go.touch()
        await waiting


@pytest.mark.parametrize(
    ("kind", "exit_code", "cause", "details"),
    [
        ("raise", 70, "rank 1 of 4 raised ValueError during `fail_on`: seven is not even", "in _raise\n"),
        ("exit", 76, "rank 1 of 4 on node node0 exited with code 7 during `fail_on`", "\nlast words"),
        (
            "kill",
            76,
            "rank 1 of 4 on node node0 was killed by SIGKILL (out of memory?) during `fail_on`",
            "\nlast words",
        ),
        ("unpicklable", 70, " of 4 raised ", "pickle"),
    ],
)
async def test_a_failure_names_rank_node_and_exit(
    tmp_path: Path, kind: str, exit_code: int, cause: str, details: str
) -> None:
    async with started(4, tmp_path, per_node=2) as (group, nodes):
        began = time.monotonic()
        with pytest.raises(RankFailedError) as caught:
            await group.call("fail_on", 1, kind)
        assert time.monotonic() - began < NOTICED_SECONDS
        assert cause in str(caught.value) and details in caught.value.__notes__[0]
        assert caught.value.exit_code == exit_code and (kind == "unpicklable" or caught.value.rank == 1)
        with pytest.raises(RankFailedError) as again:
            await group.call("product", 1)
        assert again.value is caught.value and nodes.num_living == 2


async def test_a_lost_rank_ends_the_calls_of_its_neighbours_too(tmp_path: Path) -> None:
    async with started(3, tmp_path, per_node=3) as (group, _):
        pids = await group.call("pid")
        began = time.monotonic()
        calls = [asyncio.create_task(group.ask([rank], "sleep_on", [rank], 60)) for rank in (0, 1)]
        await asyncio.sleep(0)  # both are sent
        os.kill(pids[1], signal.SIGKILL)
        for call in calls:
            with pytest.raises(RankFailedError, match="rank 1 of 3 on node node0 was killed by SIGKILL"):
                await call
        assert time.monotonic() - began < NOTICED_SECONDS


async def test_errors_of_megarl_and_of_the_constructor_keep_their_class(tmp_path: Path) -> None:
    async with started(2, tmp_path, per_node=1) as (group, _):
        with pytest.raises(DataError, match="shard 1 is missing"):
            await group.construct("probe:Probe", {"broken_rank": 1})


async def test_a_death_between_calls_is_told_by_the_next(tmp_path: Path) -> None:
    async with started(3, tmp_path, per_node=3) as (group, _):
        pids = await group.call("pid")
        os.kill(pids[0], signal.SIGKILL)
        await wait_for_end(pids[:1])
        with pytest.raises(RankFailedError, match="rank 0 of 3 on node node0 was killed by SIGKILL"):
            await group.call("product", 1)


@pytest.mark.parametrize("is_under_way", [True, False])
async def test_the_death_of_an_agent_is_told_as_that(tmp_path: Path, is_under_way: bool) -> None:
    async with started(4, tmp_path, per_node=2) as (group, nodes):
        pids = await group.call("pid")
        calling = asyncio.create_task(group.call("sleep_on", 2, 60)) if is_under_way else None
        await asyncio.sleep(0)  # it is sent
        nodes.processes[1].kill()
        await nodes.processes[1].wait()
        cause = "rank [23] of 4 was cut off: the agent of its node node1 ended or lost its connection during"
        with pytest.raises(RankFailedError, match=cause) as caught:
            await (calling or group.call("product", 1))
        assert caught.value.exit_code == 76 and nodes.num_living == 1
        # They end with their agent.
        await wait_for_end(pids)


async def test_the_ended_rank_is_named_though_another_node_s_agent_ended_first(tmp_path: Path) -> None:
    async with started(4, tmp_path, per_node=2) as (group, nodes):
        pids, handles = await group.call("pid"), list(group.ranks.handles)
        calling = asyncio.create_task(group.call("sleep", 60))
        await asyncio.sleep(0)  # it is sent
        os.kill(pids[1], signal.SIGSTOP)
        nodes.processes[1].kill()
        async with asyncio.timeout(50):
            while {handle.rank for handle in handles if handle.is_cut_off} != {2, 3}:
                await asyncio.sleep(0.01)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RankFailedError, match="rank 1 of 4 on node node0 was killed by SIGKILL"):
            await calling


async def test_who_is_late_is_told_with_the_stacks_of_all_ranks(tmp_path: Path) -> None:
    async with started(3, tmp_path, per_node=2) as (group, _):
        await see_who_is_late(group, 1.0)


async def test_only_ranks_that_are_stopped_are_ended_and_the_others_read_their_next_commands(tmp_path: Path) -> None:
    async with started(2, tmp_path, per_node=1) as (group, _):
        pids = await group.call("pid")
        for number in range(2):
            go = tmp_path / f"go{number}"
            waiting = asyncio.create_task(group.call("wait_for", str(go)))
            await asyncio.sleep(0)  # it is sent
            await group.diagnosis.end_if_stopped("sat there", 1.0)
            go.touch()
            await waiting
            assert await group.call("product", 2) == [(0, 2), (1, 4)]
        await stop(pids[1])
        calling = asyncio.create_task(group.call("product", 3))
        await asyncio.sleep(0)  # it is sent
        await group.diagnosis.end_if_stopped("sat there", 1.0)
        with pytest.raises(RankFailedError, match="rank 1 of 2 sat there"):
            await calling


async def test_a_stopped_rank_writes_its_stacks_once_it_goes_on(tmp_path: Path) -> None:
    async with started(2, tmp_path, per_node=2) as (group, _):
        pids = await group.call("pid")
        await stop(pids[1])
        stacks = await group.diagnosis.read_stacks()
        assert is_complete(stacks[0]) and not stacks[1]
        os.kill(pids[1], signal.SIGCONT)
        await group.diagnosis.end_if_stopped("sat there", 1.0)
        assert all(map(is_complete, (await group.diagnosis.read_stacks()).values()))
        assert await group.call("product", 2) == [(0, 2), (1, 4)]


@pytest.mark.parametrize("stopped", ["rank", "agent"])
async def test_a_stopped_process_is_named_by_what_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: str
) -> None:
    monkeypatch.setattr(diagnosis, "STACKS_SECONDS", 1.0)
    monkeypatch.setattr(group_end, "_KILL_SECONDS", 1.0)
    async with started(4, tmp_path, per_node=2) as (group, nodes):
        pids = await group.call("pid")
        group.deadlines = Deadlines.for_all_methods(1.0)
        os.kill(pids[3] if stopped == "rank" else nodes.processes[1].pid, signal.SIGSTOP)
        with pytest.raises(RankFailedError) as caught:
            await group.call("product", 1)
        if stopped == "rank":
            assert caught.value.cause == "rank 3 of 4 did not answer `product` within 1 s"
        else:
            cause = "ranks 2, 3 of 4 did not answer `product` within 1 s; the agent of its node does not answer"
            assert caught.value.cause == cause
        assert nodes.num_living == (2 if stopped == "rank" else 1)


@pytest.mark.usefixtures("own_fork_servers")
async def test_a_fork_server_that_is_stopped_before_it_forks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stops_itself.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    async with spawned_nodes(1, 2, tmp_path / "logs") as nodes:
        group = WorkerGroup(2, places=nodes.choose_places(2, (), on_one_node=False))
        cause = r"ranks 0, 1 of 2 did not answer `start` within \d s; its fork server \(process \d+\) is stopped"
        with pytest.raises(RankFailedError, match=cause):
            await group.start(
                "probe:Probe", {}, log_folder=tmp_path, imports=["stops_itself"], start_timeout_seconds=3.0
            )
        # The node serves the next group.
        assert nodes.num_living == 1
        async with group_on(nodes, tmp_path, 2) as group:
            assert await group.call("product", 1) == [(0, 1), (1, 2)]


async def test_a_stop_signal_to_an_agent_reaches_the_driver_and_ends_nothing(tmp_path: Path) -> None:
    async with started(2, tmp_path, per_node=1) as (group, nodes):
        names: asyncio.Queue[str] = asyncio.Queue()
        nodes.on_signal = names.put_nowait
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            nodes.processes[1].send_signal(number)
            assert await asyncio.wait_for(names.get(), 20) == number.name
        assert await group.call("product", 1) == [(0, 1), (1, 2)]


async def test_ranks_and_their_folders_end_with_the_connection_to_the_driver(tmp_path: Path) -> None:
    async with started(4, tmp_path, per_node=2) as (group, nodes):
        pids = await group.call("pid")
        folders = [Path(path) for path in await group.call("temporary")]
        busy = asyncio.create_task(group.call("sleep", 600))
        await asyncio.sleep(0.1)
        for agent in nodes.agents:
            agent.cut()
        async with asyncio.timeout(60):
            assert [await process.wait() for process in nodes.processes] == [0, 0]
        with pytest.raises(RankFailedError, match="was cut off"):
            await busy
        await wait_for_end(pids)
        assert not any(folder.exists() or folder.parent.exists() for folder in folders)


async def test_a_node_that_replaces_a_lost_one_gets_its_number(tmp_path: Path) -> None:
    async with spawned_nodes(2, 1, tmp_path) as nodes:
        nodes.processes[0].kill()
        await nodes.agents[0].ended
        assert nodes.num_living == 1
        await nodes.replenish(1, START_SECONDS)
        assert len(nodes.processes) == 2
        await nodes.replenish(2, START_SECONDS)
        assert [agent.node for agent in nodes.agents] == ["node2", "node1"]
        async with group_on(nodes, tmp_path, 2) as group:
            assert [place[0] for place in group.topology] == ["node2", "node1"]
            assert await group.call("product", 1) == [(0, 1), (1, 2)]
        # A further node is a spare one. It takes the number of the next lost node.
        await nodes.replenish(3, START_SECONDS)
        assert [agent.node for agent in nodes.agents] == ["node2", "node1", "node3"]
        nodes.processes[1].kill()
        await nodes.agents[1].ended
        nodes.fill_gaps()
        assert [agent.node for agent in nodes.agents] == ["node2", "node3", "node1"]
        assert [agent.is_lost for agent in nodes.agents] == [False, False, True]
        assert [place.node_number for place in nodes.free_places(())] == [0, 1]


async def test_an_agent_goes_on_while_it_waits_for_stacks(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    stack = 'Current thread 0x1 (most recent call first):\n  File "/x/probe.py", line 1 in <module>\n'
    agent = object.__new__(Agent)
    agent._ranks = {7: cast(_Rank, SimpleNamespace(log=log, forked=Mock(), obstacle=None))}
    # An agent that did not let the event loop turn would never see this.
    asyncio.get_running_loop().call_soon(log.write_text, stack)
    assert await agent._read_stacks([7], 5.0) == {7: stack}


async def played_link(num_ranks: int) -> tuple[AgentLink, list[RankHandle], socket.socket]:
    """A link to an agent that the test plays, with ranks without processes."""
    ours, theirs = socket.socketpair()
    link = AgentLink(ours, Introduction(0, "node0", "127.0.0.1"))
    await link.open()
    handles = [RankHandle(rank, Path("none.log")) for rank in range(num_ranks)]
    link._handles |= {handle.process: handle for handle in handles}
    return link, handles, theirs


def expected_answers(handles: list[RankHandle]) -> Answers:
    return {handle: asyncio.get_running_loop().create_future() for handle in handles}


def answer_of(handle: RankHandle) -> bytes:
    message = pack((True, f"of {handle.rank}", None))[8:]
    return ANSWER.pack(handle.process, len(message)) + message


async def test_answers_that_arrived_are_read_though_a_later_write_fails() -> None:
    link, handles, theirs = await played_link(2)
    answers = expected_answers(handles)
    whole = link.ask(dict.fromkeys(handles, b""), answers)
    for handle in handles:
        theirs.sendall(answer_of(handle))
    theirs.close()
    link.send(b"to nobody")
    await whole
    assert [answers[handle].result() for handle in handles] == ["of 0", "of 1"]
    await link.ended
    assert link.is_lost
    # What ended is the connection, perhaps not the ranks.
    assert all(handle.is_cut_off for handle in handles)


async def test_answers_in_pieces_and_in_any_order_reach_their_calls() -> None:
    link, handles, theirs = await played_link(2)
    answers = expected_answers(handles)
    pieces = b"".join(map(answer_of, reversed(handles)))
    whole = link.ask(dict.fromkeys(handles, b"x"), answers)
    for start in range(0, len(pieces), 7):
        theirs.sendall(pieces[start : start + 7])
        await asyncio.sleep(0.001)
    await whole
    assert [answers[handle].result() for handle in handles] == ["of 0", "of 1"]
    theirs.close()
    await link.ended


async def test_nobody_is_told_of_errors_that_no_call_waits_for() -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
    link, handles, theirs = await played_link(2)
    answers = expected_answers(handles)
    link.ask(dict.fromkeys(handles, b"x"), answers)
    theirs.close()
    await asyncio.wait(answers.values())
    assert all(isinstance(answer.exception(), RankError) for answer in answers.values())
    again = expected_answers(handles)
    link.ask(dict.fromkeys(handles, b"x"), again)
    answers.clear()
    again.clear()
    await asyncio.sleep(0)
    gc.collect()
    assert not complaints


async def test_a_message_in_common_is_packed_once() -> None:
    link, handles, theirs = await played_link(3)
    common, other = b"c" * 5, b"other"
    parts = _pack_messages({handles[0]: common, handles[1]: other, handles[2]: common})
    first, second, third = (handle.process.to_bytes(4, "little") for handle in handles)
    head = BATCH.pack(2) + PART.pack(2, 5) + first + third
    assert parts == [head, common, PART.pack(1, 5) + second, other]
    theirs.close()
    await link.ended
