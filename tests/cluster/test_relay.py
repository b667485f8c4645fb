"""Ranks behind the relays of their nodes: calls, failures and ends are those of ranks that are reached directly."""

from __future__ import annotations

import asyncio
import importlib
import os
import pickle
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from megarl.cluster import stack_requests
from megarl.cluster.connected import ConnectedGroup
from megarl.cluster.deadlines import Deadlines, Limit
from megarl.cluster.handshake import admit, introduce
from megarl.cluster.messages import pack
from megarl.cluster.rank_errors import RankFailedError
from megarl.cluster.rank_handle import RankHandle
from megarl.cluster.relay import ANSWER, BATCH, PART, start
from megarl.cluster.stacks import is_complete
from megarl.processes.process_tree import descendants
from megarl.types import DataError, PeerLostError
from tests.child_processes import is_alive
from tests.cluster.lateness import see_who_is_late

pytestmark = pytest.mark.distributed

BENCH = Path(__file__).resolve().parents[2] / "tools" / "bench"


@pytest.fixture(autouse=True)
def forked_ranks(worker_module: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forked from one interpreter: a dozen groups of them start in no time."""
    monkeypatch.syspath_prepend(str(BENCH))


@asynccontextmanager
async def started(
    world_size: int, log_folder: Path, per_node: int | None = None, most_direct: int = 0
) -> AsyncIterator[ConnectedGroup]:
    """A group of Probes, behind relays unless they are few, of which no process is left."""
    idle_ranks = importlib.import_module("idle_ranks")
    group: ConnectedGroup = idle_ranks.ForkedGroup(world_size, per_node or world_size)
    group.most_direct = most_direct
    await group.start("probe:Probe", {}, log_folder=log_folder)
    pids = await group.call("pid")
    relays = relays_of(pids)
    try:
        yield group
    finally:
        await group.close()
    await ended([*relays.values(), *pids])


async def ended(pids: list[int]) -> None:
    """Wait until these processes have ended."""
    async with asyncio.timeout(120):
        while any(map(is_alive, pids)):
            await asyncio.sleep(0.01)


def relays_of(pids: list[int]) -> dict[int, int]:
    """The process of each relay, by the rank that started it."""
    return {rank: relay for rank, pid in enumerate(pids) for relay in descendants(pid)}


async def test_calls_go_through_one_relay_for_each_node_of_several_ranks(tmp_path: Path) -> None:
    async with started(5, tmp_path, per_node=2) as group:
        assert list(relays_of(await group.call("pid"))) == [0, 2]  # rank 4 is alone on its node
        assert [handle.connection.is_relay for handle in group._remote_handles] == [True] * 4 + [False]
        assert await group.call("product", 2) == [(rank, 2 * (rank + 1)) for rank in range(5)]
        assert [place[0] for place in group.topology] == ["node0", "node0", "node1", "node1", "node2"]
        assert await group.scatter("product", [5, 6, 7, 8, 9]) == [(0, 5), (1, 12), (2, 21), (3, 32), (4, 45)]
        large = np.arange(3_000_000)
        for rank, answer in enumerate(await group.scatter("reversed", [large, large[::3], large[:0], large, large])):
            assert len(answer) == [3_000_000, 1_000_000, 0, 3_000_000, 3_000_000][rank]
            assert not len(answer) or answer[-1] == rank
        # Calls to ranks of one node do not wait for each other.
        here, there = str(tmp_path / "here"), str(tmp_path / "there")
        await asyncio.gather(group.ask([0], "meet", [(here, there)]), group.ask([1], "meet", [(there, here)]))
        words = [asyncio.create_task(group.ask([3, 1], "hear", [word, word])) for word in "abc"]
        assert [await word for word in words][-1] == [["a", "b", "c"]] * 2


async def test_a_rank_that_answers_late_does_not_delay_its_neighbours_answer(tmp_path: Path) -> None:
    async with started(2, tmp_path) as group:
        go = tmp_path / "go"
        waiting = asyncio.create_task(group.ask([0, 1], "wait_for", [str(tmp_path), str(go)]))
        async with asyncio.timeout(120):
            while [handle.rank for call in group._calls for handle in call.silent()] != [1]:
                await asyncio.sleep(0.01)
        assert not waiting.done()
        go.touch()
        await waiting


@pytest.mark.parametrize(
    ("kind", "exit_code", "cause", "details"),
    [
        ("raise", 70, "rank 1 of 4 raised ValueError during `fail_on`: seven is not even", "in _raise\n"),
        ("exit", 76, "rank 1 of 4 on node node0 ended or lost its connection during `fail_on`", "\nlast words"),
        ("kill", 76, "rank 1 of 4 on node node0 ended or lost its connection during `fail_on`", "\nlast words"),
        ("unpicklable", 70, " of 4 raised ", "pickle"),
    ],
)
async def test_a_failure_behind_a_relay_names_the_rank(
    tmp_path: Path, kind: str, exit_code: int, cause: str, details: str
) -> None:
    async with started(4, tmp_path, per_node=2) as group:
        begun = time.monotonic()
        with pytest.raises(RankFailedError) as caught:
            await group.call("fail_on", 1, kind)
        assert time.monotonic() - begun < 30  # the others sleep for 60
        assert cause in str(caught.value) and details in caught.value.__notes__[0]
        assert caught.value.exit_code == exit_code and (kind == "unpicklable" or caught.value.rank == 1)
        with pytest.raises(RankFailedError) as again:
            await group.call("product", 1)
        assert again.value is caught.value


async def test_a_lost_rank_ends_the_calls_of_its_neighbours_too(tmp_path: Path) -> None:
    async with started(3, tmp_path) as group:
        pids = await group.call("pid")
        begun = time.monotonic()
        calls = [asyncio.create_task(group.ask([rank], "sleep_on", [rank], 60)) for rank in (0, 1)]
        await asyncio.sleep(0)  # both are sent
        os.kill(pids[1], signal.SIGKILL)
        for call in calls:
            with pytest.raises(RankFailedError, match="rank 1 of 3 on node node0 ended"):
                await call
        assert time.monotonic() - begun < 30


async def test_errors_of_megarl_and_of_the_constructor_keep_their_class(tmp_path: Path) -> None:
    async with started(2, tmp_path) as group:
        with pytest.raises(DataError, match="shard 1 is missing"):
            await group.construct("probe:Probe", {"broken_rank": 1})


async def test_a_death_between_calls_is_told_by_the_next(tmp_path: Path) -> None:
    async with started(3, tmp_path) as group:
        pids = await group.call("pid")
        os.kill(pids[0], signal.SIGKILL)  # the one that started the relay, which outlives it
        await ended(pids[:1])
        with pytest.raises(RankFailedError, match="rank 0 of 3 on node node0 ended or lost its connection"):
            await group.call("product", 1)


@pytest.mark.parametrize("is_under_way", [True, False])
async def test_the_death_of_a_relay_is_told_as_that(tmp_path: Path, is_under_way: bool) -> None:
    async with started(4, tmp_path, per_node=2) as group:
        pids = await group.call("pid")
        relay = relays_of(pids)[2]
        calling = [asyncio.create_task(group.call("sleep_on", 2, 60))] if is_under_way else []
        await asyncio.sleep(0)  # it is sent
        os.kill(relay, signal.SIGKILL)
        await ended([relay])
        told = "rank [23] of 4 was cut off: the relay of its node node1 ended or lost its connection during"
        with pytest.raises(RankFailedError, match=told) as caught:
            await (calling[0] if calling else group.call("product", 1))
        assert caught.value.exit_code == 76


async def test_the_ended_rank_is_named_though_another_relay_ended_first(
    tmp_path: Path,
) -> None:
    async with started(4, tmp_path, per_node=2) as group:
        pids = await group.call("pid")
        calling = asyncio.create_task(group.call("sleep", 60))
        await asyncio.sleep(0)  # it is sent
        os.kill(relays_of(pids)[2], signal.SIGKILL)
        async with asyncio.timeout(50):
            while {handle.rank for handle in group._remote_handles if handle.is_cut_off} != {2, 3}:
                await asyncio.sleep(0.01)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RankFailedError, match="rank 1 of 4 on node node0 ended or lost its connection"):
            await calling


async def test_who_is_late_behind_a_relay_is_told_with_the_stacks_of_all_ranks(tmp_path: Path) -> None:
    async with started(3, tmp_path) as group:
        await see_who_is_late(group, 1.0)


@pytest.mark.parametrize("most_direct", [0, 2])
async def test_only_ranks_that_are_stopped_are_ended_and_the_others_read_their_next_commands(
    tmp_path: Path, most_direct: int
) -> None:
    async with started(2, tmp_path, most_direct=most_direct) as group:
        pids = await group.call("pid")
        for number in range(2):
            go = tmp_path / f"go{number}"
            waiting = asyncio.create_task(group.call("wait_for", str(go)))
            await asyncio.sleep(0)  # it is sent
            await group.end_if_stopped("sat there", 1.0)
            go.touch()
            await waiting
            assert await group.call("product", 2) == [(0, 2), (1, 4)]
        os.kill(pids[1], signal.SIGSTOP)
        calling = asyncio.create_task(group.call("product", 3))
        await asyncio.sleep(0)
        await group.end_if_stopped("sat there", 1.0)
        with pytest.raises(RankFailedError, match="rank 1 of 2 sat there"):
            await calling


async def test_a_late_answer_to_a_request_for_stacks_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(2, tmp_path) as group:
        stopped = (await group.call("pid"))[1]
        asked: list[list[int]] = []
        ask = group.ask_for_stacks

        def noted(handles: Sequence[RankHandle]) -> Sequence[RankHandle]:
            asked.append([handle.rank for handle in handles])
            return ask(handles)

        monkeypatch.setattr(group, "ask_for_stacks", noted)
        os.kill(stopped, signal.SIGSTOP)
        # The rank has no command to execute: faulthandler cannot read the frames of a thread at work.
        assert not (await group.current_stacks())[1]
        # A second byte could become part of a message.
        searching = asyncio.create_task(group.end_if_stopped("sat there", 20.0))
        await asyncio.sleep(0.5)
        os.kill(stopped, signal.SIGCONT)
        await searching
        assert asked == [[0, 1], [0]]
        assert await group.call("product", 2) == [(0, 2), (1, 4)]
        # It has answered, so it is asked again.
        assert is_complete((await group.current_stacks())[1])
        assert asked[2:] == [[0, 1]]


@pytest.mark.parametrize("most_direct", [0, 2])
async def test_a_stopped_rank_is_found_early_except_in_calls_with_large_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_direct: int
) -> None:
    monkeypatch.setattr(stack_requests, "STACKS_SECONDS", 1.0)
    async with started(2, tmp_path, most_direct=most_direct) as group:
        group.stacks.most_seconds = 1.0
        pids = await group.call("pid")
        own = {"sleep": Limit(4.0, "cluster.checkpoint_timeout_seconds")}
        group.deadlines = Deadlines(Limit(0.5), Limit(600.0), own)
        # A rank that works writes its stacks, and goes on.
        go = tmp_path / "go"
        waiting = asyncio.create_task(group.call("wait_for", str(go)))
        await asyncio.sleep(2.0)
        go.touch()
        await waiting
        assert group.stacks.unread == {}
        os.kill(pids[1], signal.SIGSTOP)
        large = asyncio.create_task(group.ask([1], "sleep", [0.0]))
        await asyncio.sleep(2.5)
        assert not large.done()
        os.kill(pids[1], signal.SIGCONT)
        assert await large == [None]
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(RankFailedError) as caught:
            await asyncio.wait_for(group.call("product", 3), 60)
        assert re.fullmatch(r"rank 1 of 2 did not answer `product` within \d s", caught.value.cause)


@pytest.mark.parametrize("stopped", ["rank", "relay"])
async def test_a_stopped_process_is_named_by_what_does_not_answer(tmp_path: Path, stopped: str) -> None:
    async with started(4, tmp_path, per_node=2) as group:
        pids = await group.call("pid")
        group.deadlines = Deadlines.same(1.0)
        relay = relays_of(pids)[2]
        os.kill(pids[3] if stopped == "rank" else relay, signal.SIGSTOP)
        with pytest.raises(RankFailedError) as caught:
            await group.call("product", 1)
        os.kill(relay, signal.SIGCONT)
        named = "rank 3" if stopped == "rank" else "ranks 2, 3"
        assert str(caught.value).startswith(f"{named} of 4 did not answer `product` within 1 s")


async def test_close_lets_ranks_leave(tmp_path: Path) -> None:
    async with started(2, tmp_path / "logs") as group:
        await group.call("leave_note", str(tmp_path))
    assert sorted(path.name for path in tmp_path.glob("left_*")) == ["left_0", "left_1"]
    with pytest.raises(PeerLostError, match="closed"):
        await group.call("product", 1)


async def test_a_cancelled_call_ends_the_group(tmp_path: Path) -> None:
    async with started(2, tmp_path) as group:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(group.call("sleep", 60), timeout=0.3)
        with pytest.raises(PeerLostError, match="call of `sleep` on the ranks was interrupted"):
            await group.call("product", 1)


async def test_strangers_are_not_relayed_and_a_message_in_common_is_sent_once() -> None:
    """The relay, between a driver and ranks that the test plays."""
    key = os.urandom(32)

    async def drive() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setblocking(False)
            start(server.getsockname(), key, "127.0.0.1", [6, 7])
            driver, _ = await loop.sock_accept(server)
        driver.setblocking(False)
        told = await admit(driver, key)
        assert told["first_rank"] == 6
        address = told["host"], told["port"]
        strangers = [socket.create_connection(address) for _ in range(3)]
        strangers[0].sendall(b"\0" * 64 + pickle.dumps(7))
        strangers[1].sendall(ANSWER.pack(6, 4) + b"lies")
        ranks = {rank: socket.create_connection(address) for rank in (7, 6)}
        for rank, connected in ranks.items():
            await asyncio.to_thread(introduce, connected, key, {"rank": rank})
        message = pack("to both")
        parts = PART.pack(2, len(message)) + np.array([6, 7], "<u4").tobytes() + message
        await loop.sock_sendall(driver, BATCH.pack(1) + parts)
        for rank, connected in ranks.items():
            connected.settimeout(20)
            assert connected.recv(len(message), socket.MSG_WAITALL) == message
            connected.sendall(pack(rank))
        driver.setblocking(True)
        driver.settimeout(20)
        answers = dict(one_answer(driver) for _ in ranks)
        assert answers == {rank: pack(rank)[8:] for rank in ranks}
        ranks[7].close()
        assert one_answer(driver) == (7, b"")
        driver.close()
        assert ranks[6].recv(1) == b""
        for connected in (ranks[6], *strangers):
            connected.close()

    def one_answer(driver: socket.socket) -> tuple[int, bytes]:
        rank, size = ANSWER.unpack(driver.recv(ANSWER.size, socket.MSG_WAITALL))
        return rank, driver.recv(size, socket.MSG_WAITALL) if size else b""

    await drive()
