"""What is said of nodes and links that are not fit."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest
import torch
import torch.distributed as dist

from megarl.cluster.agents.agent_link import RankPlace
from megarl.cluster.agents.topology import Introduction, sort_by_switches, visible_gpu_variables
from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.cluster.checks.bandwidth import (
    ACROSS,
    WITHIN,
    Bandwidth,
    describe_bandwidths,
    find_slow_links,
    make_exchange_rounds,
)
from megarl.cluster.checks.node_checks import (
    find_all_faults,
    find_memory_shortages,
    find_node_faults,
    inspect_nodes,
    join_reports,
    split_ranks_by_kind,
    unfit_nodes_error,
    unreachable_nodes,
)
from megarl.cluster.checks.node_report import NodeReport
from megarl.cluster.run_ranks import RunRanks
from megarl.config import Recipe
from megarl.planner.memory.node_bytes import RankHostBytes
from megarl.platform import device
from megarl.platform.gpu_needs import field_needs
from megarl.platform.memory.host_memory import machine_bytes
from megarl.platform.visible_gpus import Gpu, installed_gpus
from megarl.types import DiskFullError
from tests.rank_pool import RankPool

GOOD = {
    "unread": [],
    "is_writable": True,
    "free_bytes": 1 << 40,
    "memory": 1 << 40,
    "shared_memory": None,
    "full_shared_memory": None,
    "device": None,
    "gpus": ["H200, 570"] * 8,
    "usable_gpus": (Gpu("NVIDIA H200", (9, 0)),) * 8,
    "versions": {"Transformer Engine": "2.11.0", "CUDA": "13.0"},
    "broken": {},
    "compiler": None,
    "time": 1000.0,
}


@pytest.mark.parametrize(
    ("changed", "error_text"),
    [
        pytest.param({}, None, id="sound"),
        pytest.param({"unread": ["/models/q"]}, "node n2: /models/q does not exist or cannot be read", id="model"),
        pytest.param({"is_writable": False}, "node n2: /runs/a cannot be written", id="run folder"),
        pytest.param({"free_bytes": 1 << 20}, "node n2: /runs/a has 1 MiB left", id="disk"),
        pytest.param({"shared_memory": "/dev/shm is full"}, "node n2: /dev/shm is full", id="shared memory"),
        pytest.param(
            {"device": "cluster.device = auto: this machine has 8 GPUs (H200), but driver 570 is too old"},
            "node n2: cluster.device = auto: this machine has 8 GPUs (H200), but driver 570",
            id="a driver that torch cannot use",
        ),
        pytest.param({"gpus": ["H200, 570"] * 7}, "node n2: shows 7 GPUs; it should have 8", id="a GPU is gone"),
        pytest.param(
            {"usable_gpus": (Gpu("NVIDIA H200", (9, 0)),) * 4},
            "node n2: CUDA_VISIBLE_DEVICES leaves 4 of its 8 GPUs visible, but 8 ranks run there; unset it",
            id="GPUs are hidden",
        ),
        pytest.param({"gpus": ["H200, 560"] * 8}, "different GPUs or drivers: H200, 560, H200, 570", id="drivers"),
        pytest.param(
            {"broken": {"transformer_engine.pytorch": "OSError: libcudnn.so"}},
            "node n2: Transformer Engine is installed but cannot be imported (OSError: libcudnn.so); run",
            id="Transformer Engine",
        ),
        pytest.param(
            {"usable_gpus": (Gpu("NVIDIA L40S", (8, 9)),) * 8},
            "node n2: trainer.fp8: NVIDIA L40S has compute capability 8.9 (Ada), it needs 9.0 (Hopper) or newer; set "
            "trainer.fp8=none, or take other GPUs",
            id="an older generation",
        ),
        pytest.param(
            {"versions": {"Transformer Engine": "2.2.0", "CUDA": "13.0"}},
            "node n2: trainer.fp8: Transformer Engine 2.2.0 is installed, it needs 2.3.0 or newer",
            id="an older library",
        ),
        pytest.param(
            {"compiler": "no C compiler (gcc, clang or $CC); install one: apt-get install gcc g++"},
            "node n2: Triton cannot compile kernels when the engine starts: no C compiler",
            id="no compiler",
        ),
        pytest.param({"time": 1100.0}, "node n2: its clock is +100 s off", id="clock"),
    ],
)
def test_a_bad_node_is_named(changed: dict[str, Any], error_text: str | None) -> None:
    reports = {"n1": GOOD, "n2": GOOD | changed, "n3": GOOD}
    found = list(find_node_faults(reports, "/runs/a", dict.fromkeys(reports, 8), field_needs()))
    assert found == [] if error_text is None else len(found) == 1 and error_text in str(found[0])


@pytest.mark.parametrize(
    ("changed", "exit_code"),
    [
        ({"free_bytes": 1 << 20}, 74),
        ({"full_shared_memory": "/dev/shm has no room"}, 74),
        ({"free_bytes": 1 << 20, "full_shared_memory": "/dev/shm has no room"}, 74),
        ({"shared_memory": "/dev/shm cannot be written"}, 2),
        # Room alone would not make this start succeed.
        ({"free_bytes": 1 << 20, "unread": ["/models/q"]}, 2),
    ],
    ids=str,
)
def test_nodes_that_lack_room_alone_end_the_start_as_a_full_disk(changed: dict[str, Any], exit_code: int) -> None:
    reports = {"n1": GOOD, "n2": GOOD | changed}
    error = unfit_nodes_error(
        "nodes of run a", list(find_node_faults(reports, "/runs/a", dict.fromkeys(reports, 8), {}))
    )
    assert error.exit_code == exit_code and isinstance(error, DiskFullError) is (exit_code == 74)
    assert str(error).count("node n2: ") == len(changed)


def test_a_full_shared_memory_is_told_from_one_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look() -> list[str]:
        report = NodeReport(0, 1)
        seen = report.inspect_node([], str(tmp_path))
        report.close()
        assert seen is not None
        return [name for name in ("shared_memory", "full_shared_memory") if seen[name]]

    monkeypatch.setenv("LOCAL_RANK", "0")
    assert look() == []
    for number, name in ((errno.ENOSPC, "full_shared_memory"), (errno.EACCES, "shared_memory")):
        monkeypatch.setattr(os, "posix_fallocate", failing(number))
        assert look() == [name]


def failing(number: int) -> Callable[..., None]:
    def fail(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_node_without_the_memory_of_the_plan_is_named() -> None:
    """Seven ranks that train on each of two nodes, and two that only sample: one there, one on a node alone."""
    nodes = ["n1"] * 7 + ["n2"] * 7 + ["n2", "n3"]
    planned = RankHostBytes(trainer=60 << 30, engine=10 << 30)
    enough = {"n1": {"memory": 420 << 30}, "n2": {"memory": 430 << 30}, "n3": {"memory": 10 << 30}}
    assert list(find_memory_shortages(enough, nodes, 14, planned)) == []
    (fault,) = find_memory_shortages(enough | {"n2": {"memory": (430 << 30) - 1}}, nodes, 14, planned)
    assert str(fault).startswith("node n2: its 8 ranks need 430 GiB of host memory") and "--mem=0" in fault.remedy


def test_the_checks_of_nodes_compare_memory() -> None:
    fields = {"name": "n", "loop": "rl", "model": {"path": "m"}, "data": {"train": "d"}}
    recipe = Recipe.model_validate(fields | {"cluster": {"ranks_per_node": 8}})
    reports = {"n1": GOOD | {"memory": 480 << 30}}
    planned = RankHostBytes(trainer=60 << 30, engine=0)
    assert find_all_faults(reports, ["n1"] * 8, recipe, "/runs/a", planned) == []
    assert find_all_faults(reports, ["n1"] * 8, recipe, "/runs/a", None) == []
    (fault,) = find_all_faults(reports, ["n1"] * 8, recipe, "/runs/a", RankHostBytes(trainer=61 << 30, engine=0))
    assert str(fault).startswith("node n1: its 8 ranks need 488 GiB of host memory, but the node has 480")


def test_groups_on_one_node_see_parts_of_its_gpus() -> None:
    """Under Ray the first rank of each group reports, with the GPUs of its own group."""
    shown = [(Gpu("NVIDIA H200", (9, 0)),) * count for count in (4, 2, 8)]
    looked = [GOOD | {"usable_gpus": gpus} for gpus in shown]
    nodes = ["a"] * 6 + ["b"] * 8
    reports = join_reports(nodes, [looked[0], *[None] * 3, looked[1], None, looked[2], *[None] * 7])
    assert {node: len(report["usable_gpus"]) for node, report in reports.items()} == {"a": 6, "b": 8}
    assert list(find_node_faults(reports, "/runs/a", {"a": 6, "b": 8}, {})) == []
    (fault,) = find_node_faults(reports, "/runs/a", {"a": 7, "b": 8}, {})
    assert str(fault).startswith("node a: CUDA_VISIBLE_DEVICES leaves 6 of its 8 GPUs visible, but 7 ranks")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_fault_that_one_group_of_a_node_finds_is_reported(order: tuple[int, int]) -> None:
    """Groups may run in containers of their own, with different files, libraries and limits."""
    wrong = {
        "unread": ["/models/a"],
        "is_writable": False,
        "memory": 1 << 30,
        "shared_memory": "/dev/shm is full",
        "device": "GPU 0 is broken",
        "broken": {"vllm": "no"},
        "compiler": "gcc is missing",
    }
    looked = [GOOD | {"memory": 8 << 30}, GOOD | wrong]
    reports = join_reports(["a", "a"], [looked[n] for n in order])
    # The memory is that of all groups together, so the larger limit counts.
    joined = {"usable_gpus": (*GOOD["usable_gpus"], *GOOD["usable_gpus"]), "memory": 8 << 30}
    assert reports["a"] == looked[1] | joined
    texts = "\n".join(map(str, find_node_faults(reports, "/runs/a", {"a": 2}, {})))
    for part in ("/models/a does", "/runs/a cannot be written", "/dev/shm is full", "GPU 0 is broken", "vllm", "gcc"):
        assert part in texts


def test_nodes_of_two_kinds_are_compared_with_their_like() -> None:
    cluster = {"launcher": "slurm", "ranks_per_node": 8, "groups": {"engines": {"nodes": 2, "ranks_per_node": 4}}}
    rollout = {"placement": "separate", "quantization": "fp8"}
    fields = {
        "name": "n",
        "loop": "rl",
        "model": {"path": "m"},
        "data": {"train": "d"},
        "trainer": {"fp8": "blockwise"},
    }
    recipe = Recipe.model_validate(fields | {"cluster": cluster, "rollout": rollout})
    trainers, engines = split_ranks_by_kind(recipe, ["a"] * 8 + ["b"] * 4 + ["c"] * 4)
    assert trainers[0] == {"a": 8} and [*trainers[1]] == ["trainer.fp8 = blockwise"]
    assert engines[0] == {"b": 4, "c": 4} and [*engines[1]] == ["rollout.quantization = fp8"]
    ada = GOOD | {"gpus": ["L40S, 570"] * 4, "usable_gpus": (Gpu("NVIDIA L40S", (8, 9)),) * 4}
    assert list(find_node_faults({"b": ada, "c": ada}, "/runs/a", engines[0], engines[1])) == []


def test_a_node_looks_around_and_tries_to_reach_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    report = NodeReport(0, 1)
    model, empty = tmp_path / "model", tmp_path / "empty"
    for folder in (model, empty):
        folder.mkdir()
    (model / "config.json").write_text("{}")
    seen = report.inspect_node([str(model), str(empty), str(tmp_path / "absent")], str(tmp_path))
    assert seen is not None and seen["unread"] == [str(empty), str(tmp_path / "absent")] and seen["is_writable"]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, but nobody listens
        tried = report.test_connections({"n1": ("127.0.0.1", seen["port"]), "n2": closed.getsockname()})
    assert tried is not None and list(tried) == ["n2"] and "Connection refused" in tried["n2"]
    assert seen["shared_memory"] is None and seen["compiler"] is None
    assert seen["memory"] == machine_bytes()
    assert seen["usable_gpus"] == installed_gpus() and seen["device"] is None
    report.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", seen["port"]))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert NodeReport(1, 2).inspect_node([], str(tmp_path)) is None
    # Numbers in the run: this group begins with rank 4.
    assert NodeReport(1, 2).inspect_node([], str(tmp_path), substitute_ranks=[3], first_rank=4) is None
    report = NodeReport(1, 2)
    assert report.inspect_node([], str(tmp_path), substitute_ranks=[5], first_rank=4) is not None
    report.close()


def test_a_node_with_gpus_tries_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    found = {}
    for kind in ("cpu", "cuda"):
        monkeypatch.setattr(device, "current", lambda kind=kind: torch.device(kind))
        report = NodeReport(0, 1)
        seen = report.inspect_node([], str(tmp_path))
        report.close()
        assert seen is not None
        found[kind] = seen["compiler"]
    assert found["cpu"] is None and "apt-get install gcc" in found["cuda"]


def test_a_node_that_cannot_be_reached_is_named_once() -> None:
    tried = {"n1": {"n3": "no answer in 10 s"}, "n2": {"n3": "no answer in 10 s"}, "n3": {}}
    (fault,) = unreachable_nodes(tried)
    assert str(fault).startswith("node n3: its ports cannot be reached from n1, n2 (no answer in 10 s)")


def test_nodes_of_one_switch_follow_each_other() -> None:
    """Slurm names the nodes n1 to n4; odd and even ones have a switch each."""
    introductions = [
        Introduction(turn, f"n{n}", f"h{n}", ("root", f"s{1 + n % 2}"), (0, 1)) for turn, n in enumerate((1, 2, 3, 4))
    ]
    nodes = sort_by_switches(reversed(introductions))
    assert [node.node for node in nodes] == ["n2", "n4", "n1", "n3"]

    def topology(*nodes: Introduction) -> list[tuple[str, ...]]:
        agents: Any = [SimpleNamespace(introduction=node) for node in nodes]
        places = [RankPlace(agent, number, rank) for number, agent in enumerate(agents) for rank in range(2)]
        return WorkerGroup(len(places), places=places).topology

    assert topology(*nodes)[1:3] == [("n2", "s1", "root"), ("n4", "s1", "root")]
    assert topology(nodes[0]._replace(switches=()), nodes[1]) == [("n2",), ("n2",), ("n4",), ("n4",)]


def test_a_rank_sees_all_gpus_that_the_launcher_gave_its_node() -> None:
    node = Introduction(0, "n1", "h1")
    assert visible_gpu_variables(node) == {}
    assert visible_gpu_variables(node._replace(gpus=(3, 1))) == {"CUDA_VISIBLE_DEVICES": "3,1"}


@pytest.mark.parametrize("nodes", ["aabb", "aaabbbccc", "abcd", "abcde", "aaaa", "a"])
def test_every_rank_has_two_partners_where_there_are_three(nodes: str) -> None:
    partners: dict[str, list[set[int]]] = {kind: [set() for _ in nodes] for kind in (WITHIN, ACROSS)}
    for kind, pairs in make_exchange_rounds(nodes):
        assert all(pairs[other] == one and one != other for one, other in pairs.items())
        for one, other in pairs.items():
            assert (nodes[one] == nodes[other]) == (kind == WITHIN)
            partners[kind][one].add(other)
    sizes = {WITHIN: nodes.count(nodes[0]), ACROSS: len(set(nodes))}
    for kind, size in sizes.items():
        assert {len(own) for own in partners[kind]} == {min(size - 1, 2)}


def test_ranks_without_a_partner_on_a_smaller_node_take_no_part() -> None:
    rounds = make_exchange_rounds("aaabb")
    assert [pairs for kind, pairs in rounds if kind == WITHIN] == [{0: 1, 1: 0, 3: 4, 4: 3}, {1: 2, 2: 1}, {0: 2, 2: 0}]
    assert [pairs for kind, pairs in rounds if kind == ACROSS] == [{0: 3, 3: 0, 1: 4, 4: 1}]


def measured() -> dict[str, float]:
    return Bandwidth(dist.get_rank(), 4, [("a",), ("a",), ("b",), ("b",)], 60.0).measure()


def test_links_are_measured(ranks: RankPool) -> None:
    found = ranks.run(measured)
    assert all(set(speeds) == {WITHIN, ACROSS, "all-reduce"} for speeds in found)
    assert all(1e6 < speed < 1e12 for speeds in found for speed in speeds.values())
    assert describe_bandwidths(found).startswith("links: within nodes ")


def test_an_exchange_is_measured_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    works = [Mock(), Mock()]
    monkeypatch.setattr(dist, "P2POp", Mock())
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda both: works)
    bandwidth = object.__new__(Bandwidth)
    bandwidth._sent_buffer = bandwidth._received_buffer = torch.zeros(1)
    bandwidth._exchange(1)
    assert all(work.wait.called for work in works)


async def test_links_between_nodes_are_compared_at_the_start(tmp_path: Path) -> None:
    """Nodes n1, n2 and n3 of one rank each; the links of n3 are slow."""
    speeds = [{ACROSS: 40e9, "all-reduce": 10e9}] * 2 + [{ACROSS: 1e9, "all-reduce": 10e9}]
    group = SimpleNamespace(
        world_size=3, topology=[("n1",), ("n2",), ("n3",)], construct=AsyncMock(), call=AsyncMock(return_value=speeds)
    )
    ranks = SimpleNamespace(
        groups=[group],
        topology=group.topology,
        local_ranks=[0] * 3,
        hosts=["127.0.0.1"] * 3,
        set_deadlines=Mock(),
        call_with_first_rank=AsyncMock(return_value=[GOOD | {"port": 1}] * 3),
        call=AsyncMock(return_value=[{}] * 3),
    )
    fields = {"name": "n", "loop": "rl", "model": {"path": "m"}, "data": {"train": "d"}}
    recipe = Recipe.model_validate(fields | {"cluster": {"launcher": "slurm", "nodes": 3}})
    wrong, notices = await inspect_nodes(cast(RunRanks, ranks), recipe, tmp_path)
    assert [str(fault).partition(":")[0] for fault in wrong] == ["node n3"]
    assert len(notices) == 1 and notices[0].startswith("links: across nodes ")


def test_a_rank_with_slow_links_is_named() -> None:
    nodes = [("n1",), ("n1",), ("n2",), ("n2",), ("n3",), ("n3",)]
    speeds = [{WITHIN: 200e9, ACROSS: 40e9 if rank != 3 else 9e9} for rank in range(6)]
    (fault,) = find_slow_links(nodes, speeds, 0.25)
    assert str(fault).startswith(
        "node n2: rank 3 moves 9.00 GB/s across nodes, the median rank 40.00; exclude the node"
    )
    assert list(find_slow_links(nodes, speeds, 0.2)) == []
