"""Files in agents' memory: held, checked, dropped, and sent to the agent of another node."""

from __future__ import annotations

import asyncio
import os
import socket
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.cluster import state_copies
from megarl.cluster.agents.agent_link import RankPlace
from megarl.cluster.agents.handshake import StrangerError
from megarl.cluster.agents.memory_files import MemoryFiles
from tests.cluster.spawned import spawned_nodes


def make_files(names: list[str], seed: int = 0) -> dict[str, dict[str, Any]]:
    """Make files in memory as a rank does. Returns them by name, as values of `MemoryFiles.hold`."""
    numbers = np.random.default_rng(seed)
    files = {}
    for index, name in enumerate(names):
        contents = numbers.bytes(1_000_000 * index)
        descriptor = os.memfd_create("test")
        os.write(descriptor, contents)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        files[name] = {"path": path, "size": len(contents), "checksum": zlib.crc32(contents)}
    return files


def close_files(files: dict[str, dict[str, Any]]) -> None:
    """End the rank's own hold of its files."""
    for fields in files.values():
        os.close(int(Path(fields["path"]).name))


def contents_of(files: dict[str, dict[str, Any]]) -> dict[str, bytes]:
    return {name: Path(fields["path"]).read_bytes() for name, fields in files.items()}


def flip_a_bit(path: str) -> None:
    with open(path, "r+b") as file:
        file.seek(700_000)
        byte = file.read(1)[0]
        file.seek(700_000)
        file.write(bytes([byte ^ 4]))


async def test_files_outlive_their_rank_and_damaged_ones_are_found_and_dropped() -> None:
    files, memory = make_files(["empty", "whole", "damaged"]), MemoryFiles()
    expected = contents_of(files)
    await memory.hold(files)
    close_files(files)
    listing = await memory.list_files(checks=True)
    assert listing["damaged"] == [] and contents_of(listing["files"]) == expected
    assert {name: fields["size"] for name, fields in listing["files"].items()} == {
        "empty": 0,
        "whole": 1_000_000,
        "damaged": 2_000_000,
    }
    flip_a_bit(listing["files"]["damaged"]["path"])
    unchecked = await memory.list_files(checks=False)
    assert unchecked == listing
    checked = await memory.list_files(checks=True)
    assert checked["damaged"] == ["damaged"] and list(checked["files"]) == ["empty", "whole"]
    assert not Path(listing["files"]["damaged"]["path"]).exists()
    await memory.drop(["whole", "unknown"])
    assert list((await memory.list_files(checks=True))["files"]) == ["empty"]
    await memory.drop(["empty"])


async def test_a_name_that_is_held_again_stands_for_the_newer_file() -> None:
    memory = MemoryFiles()
    older, newer = make_files(["a", "b"], seed=1), make_files(["a", "b"], seed=2)
    expected = contents_of(newer)
    await memory.hold(older)
    num_open = len(os.listdir("/proc/self/fd"))
    await memory.hold(newer)
    # The older ones are closed.
    assert len(os.listdir("/proc/self/fd")) == num_open
    close_files(older)
    close_files(newer)
    listing = await memory.list_files(checks=True)
    assert contents_of(listing["files"]) == expected
    await memory.drop(["a", "b"])


async def test_another_agent_fetches_what_is_offered() -> None:
    # asyncio then refuses a server whose `accept` would stop the agent.
    asyncio.get_running_loop().set_debug(True)
    names = ["empty", "short", "long"]
    files, sender, receiver = make_files(names), MemoryFiles(), MemoryFiles()
    expected = contents_of(files)
    await sender.hold(files)
    close_files(files)
    offered = await sender.offer(["long", "empty"], "127.0.0.1")
    # A stranger that says nothing does not hold up the other agent.
    with socket.create_connection((offered["address"][0], offered["address"][1])):
        await asyncio.wait_for(receiver.fetch(**offered), 20)
    listing = await receiver.list_files(checks=True)
    assert listing["damaged"] == []
    assert contents_of(listing["files"]) == {name: expected[name] for name in ("long", "empty")}
    # The sender still has all of them.
    assert set((await sender.list_files(checks=True))["files"]) == {*names}
    await receiver.drop(names)
    await sender.drop(names)


async def test_without_the_key_nothing_is_received() -> None:
    files, sender, receiver = make_files(["none", "secret"]), MemoryFiles(), MemoryFiles()
    await sender.hold(files)
    close_files(files)
    offered = await sender.offer(["secret"], "127.0.0.1")
    with pytest.raises((StrangerError, OSError)):
        await receiver.fetch(**offered | {"key": "00" * 32})
    assert (await receiver.list_files(checks=False))["files"] == {}
    await sender.drop(["none", "secret"])


@pytest.mark.usefixtures("worker_module", "nothing_left")
async def test_each_rank_reads_the_copies_of_its_node_also_those_of_a_node_that_leaves(tmp_path: Path) -> None:
    """Ranks 0 and 1 have a copy on their own node each. Node 1 then leaves the run."""
    names = ["7/0/2/own", "7/0/2/driver", "7/1/2/own", "7/1/2/driver", "6/1/2/own"]
    files = make_files(names)
    expected = contents_of(files)
    async with spawned_nodes(2, 1, tmp_path) as nodes:
        agents = nodes.agents
        of_node = [{name: files[name] for name in names[:2]}, {name: files[name] for name in names[2:]}]
        await asyncio.gather(*(a.request("hold", files=held) for a, held in zip(agents, of_node, strict=True)))
        close_files(files)
        copies, damages = await state_copies.list_copies(agents, checks=True)
        assert damages == []
        assert [(copy.agent, copy.step, copy.origin, copy.num_ranks) for copy in copies] == [
            (agents[0], 7, 0, 2),
            (agents[1], 7, 1, 2),
            (agents[1], 6, 1, 2),
        ]
        assert state_copies.is_complete(copies, 7) and not state_copies.is_complete(copies, 6)
        assert not state_copies.is_complete(copies[:1], 7) and not state_copies.is_complete([], 7)

        places = [RankPlace(agents[0], 0, 0), RankPlace(agents[1], 1, 0)]
        for_ranks = await state_copies.files_for_ranks(agents, 7, places)
        assert [list(of_rank) for of_rank in for_ranks] == [names[:2], names[2:4]]
        assert contents_of({**for_ranks[0], **for_ranks[1]}) == {name: expected[name] for name in names[:4]}

        # Both ranks of the next attempt are on node 0, which has none of rank 1's copies.
        places = [RankPlace(agents[0], 0, 0), RankPlace(agents[0], 0, 1)]
        for_ranks = await state_copies.files_for_ranks(agents, 7, places)
        assert [set(of_rank) for of_rank in for_ranks] == [{*names[:4]}] * 2
        for of_rank in for_ranks:
            assert contents_of(of_rank) == {name: expected[name] for name in names[:4]}
            assert all(f"/proc/{nodes.processes[0].pid}/" in fields["path"] for fields in of_rank.values())

        # One bit of a file makes its whole copy useless, on its node alone.
        flip_a_bit(for_ranks[0]["7/1/2/own"]["path"])
        copies, damages = await state_copies.list_copies(agents, checks=True)
        assert [(copy.agent, copy.origin) for copy in copies if copy.step == 7] == [(agents[0], 0), (agents[1], 1)]
        [damage] = damages
        assert damage.startswith("node node0: the copy of rank 1's state after step 7 has changed")

        await state_copies.drop_others(agents, 7)
        assert {copy.step for copy in (await state_copies.list_copies(agents))[0]} == {7}
        # A lost node's copies are lost with it.
        nodes.processes[1].kill()
        await agents[1].ended
        copies, _ = await state_copies.list_copies(agents)
        assert [copy.origin for copy in copies if copy.agent is agents[1]] == []
        await state_copies.drop_others(agents, None)
        assert (await state_copies.list_copies(agents))[0] == []
