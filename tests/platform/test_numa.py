"""Where ranks are bound, on machines as /sys shows them: folders of the same form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.platform import numa

SOCKETS = {0: "0-15,32-47", 1: "16-31,48-63"}
"""Two sockets of 16 cores with two hardware threads each: core c has the threads c and c + 32."""
GPUS = [f"0000:{bus:02x}:00.0" for bus in (0x0F, 0x2D, 0x44, 0x5B, 0x89, 0xA8, 0xC0, 0xD8)]
NICS = {f"mlx5_{n}": n // 4 for n in range(8)}
ALL = range(64)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def machine(
    root: Path,
    nodes: Mapping[int, str] = SOCKETS,
    gpus: Mapping[str, int] | None = None,
    nics: Mapping[str, int] = NICS,
    threads: int = 2,
) -> Path:
    """Write the files of a machine: NUMA nodes, hardware threads, GPUs and adapters with their nodes."""
    cores = [core for text in nodes.values() for core in numa.parse_core_ranges(text)]
    for node, text in nodes.items():
        write(root / f"devices/system/node/node{node}/cpulist", text)
    # Files of /sys that are no nodes.
    write(root / "devices/system/node/online", "0-1")
    for core in cores if threads > 1 else ():
        step = len(cores) // threads
        pair = ",".join(str(core % step + n * step) for n in range(threads))
        write(root / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list", pair)
    for gpu, node in (gpus if gpus is not None else {gpu: n // 4 for n, gpu in enumerate(GPUS)}).items():
        write(root / f"bus/pci/devices/{gpu}/numa_node", str(node))
    for nic, node in nics.items():
        write(root / f"class/infiniband/{nic}/device/numa_node", str(node))
    return root


def cores_of(found: Sequence[numa.Place]) -> list[str]:
    return [numa.core_ranges(place.cores) for place in found]


def test_two_sockets_with_four_gpus_and_adapters_each(tmp_path: Path) -> None:
    found = numa.places(GPUS, ALL, machine(tmp_path))
    assert [place.node for place in found] == [0, 0, 0, 0, 1, 1, 1, 1]
    # Four cores each, with both of their hardware threads.
    assert cores_of(found) == [f"{n}-{n + 3},{n + 32}-{n + 35}" for n in range(0, 32, 4)]
    assert found[0].adapters == ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3")
    assert found[7].adapters == ("mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7")
    assert found[4].description == (
        "GPU 0000:89:00.0, NUMA node 1, cores 16-19,48-51, adapters mlx5_4, mlx5_5, mlx5_6, mlx5_7"
    )


def test_ranks_follow_the_order_of_their_gpus(tmp_path: Path) -> None:
    order = [GPUS[n] for n in (4, 0, 1)]
    found = numa.places(order, ALL, machine(tmp_path))
    assert [place.node for place in found] == [1, 0, 0]
    assert cores_of(found) == ["16-31,48-63", "0-7,32-39", "8-15,40-47"]


@pytest.mark.parametrize("node", [0, -1])
def test_one_node_is_that_of_all_gpus(tmp_path: Path, node: int) -> None:
    """Firmware of machines with one node often writes -1."""
    root = machine(tmp_path, {0: "0-7"}, dict.fromkeys(GPUS[:3], node), {"mlx5_0": node}, threads=1)
    found = numa.places(GPUS[:3], range(8), root)
    assert [place.node for place in found] == [0, 0, 0] and found[0].adapters == ("mlx5_0",)
    # Disjoint, all cores used, sizes differ by at most one.
    assert cores_of(found) == ["0-1", "2-4", "5-7"]


def test_groups_of_one_machine_have_different_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under Ray two groups may share a machine. Each sees only its own GPUs, and counts its ranks from zero."""
    root = machine(tmp_path)
    for gpu in GPUS:
        write(root / f"bus/pci/devices/{gpu}/vendor", "0x10de")
        write(root / f"bus/pci/devices/{gpu}/class", "0x030200")
    # A network adapter of NVIDIA, and another firm's display.
    for device, vendor, kind in (("0000:01:00.0", "0x10de", "0x020000"), ("0000:02:00.0", "0x1a03", "0x030000")):
        write(root / f"bus/pci/devices/{device}/vendor", vendor)
        write(root / f"bus/pci/devices/{device}/class", kind)
        write(root / f"bus/pci/devices/{device}/numa_node", "0")
    monkeypatch.setattr(numa, "allowed_cores", lambda: frozenset(ALL))
    monkeypatch.setenv(numa.VARIABLE, numa.BY_GPU)
    alone = cores_of(numa.places(GPUS, ALL, root))
    trainers, engines = numa.rank_places(GPUS[:2], root), numa.rank_places([GPUS[3], GPUS[2], GPUS[7]], root)
    assert cores_of(trainers) == alone[:2]
    assert cores_of(engines) == [alone[3], alone[2], alone[7]]
    # A container with two groups of one GPU each. /sys still shows it the machine's eight.
    driver = tmp_path / "proc/driver/nvidia/gpus"
    for gpu in GPUS[:2]:
        (driver / gpu.upper()).mkdir(parents=True)
    contained = [cores_of(numa.rank_places([gpu], root, driver)) for gpu in GPUS[:2]]
    assert contained == [["0-7,32-39"], ["8-15,40-47"]]
    # A sandbox that hides the files of other devices: only visible GPUs count.
    for gpu in GPUS[2:]:
        (root / f"bus/pci/devices/{gpu}/vendor").unlink()
    assert cores_of(numa.rank_places(GPUS[:2], root)) == ["0-7,32-39", "8-15,40-47"]
    # One group, which knows all ranks of the machine.
    monkeypatch.setenv(numa.VARIABLE, "2")
    assert cores_of(numa.rank_places(GPUS, root)) == ["0-7,32-39", "8-15,40-47"]


def test_an_unknown_node_binds_nobody_else_wrongly(tmp_path: Path) -> None:
    gpus = {GPUS[0]: 0, GPUS[1]: -1, GPUS[4]: 1}
    root = machine(tmp_path, gpus=gpus)
    found = numa.places([*gpus, "0000:ff:00.0"], ALL, root)
    assert [place.node for place in found] == [0, None, 1, None]
    assert cores_of(found) == ["0-15,32-47", "", "16-31,48-63", ""]
    assert [place.fault for place in found] == [None, numa.UNKNOWN, None, numa.UNKNOWN]
    assert "NUMA node unknown, not bound: /sys does not name" in found[1].description


def test_a_kernel_without_numa_nodes(tmp_path: Path) -> None:
    assert numa.places(GPUS[:1], ALL, tmp_path) == [numa.Place(GPUS[0], None, fault=numa.UNKNOWN)]


def test_more_ranks_than_cores_share_them(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: "0-2"}, dict.fromkeys(GPUS[:8], 0), {}, threads=1)
    found = numa.places(GPUS[:8], range(3), root)
    assert cores_of(found) == ["0", "0", "0", "1", "1", "1", "2", "2"]


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        pytest.param("0-7,32-39", ["0-3,32-35", "4-7,36-39", ""], id="half of one socket"),
        pytest.param("2,34,20-21", ["2,34", "2,34", "20-21"], id="one core for two ranks"),
        pytest.param("32-63", ["32-39", "40-47", "48-63"], id="one hardware thread of each core"),
    ],
)
def test_ranks_stay_inside_the_allowed_cores(tmp_path: Path, allowed: str, expected: list[str]) -> None:
    found = numa.places([GPUS[0], GPUS[1], GPUS[4]], numa.parse_core_ranges(allowed), machine(tmp_path))
    assert cores_of(found) == expected
    assert [place.fault for place in found] == [None if cores else numa.OUTSIDE for cores in expected]


@pytest.mark.parametrize("text", ["", "5", "0-3,8", "0,2,4-6"])
def test_core_ranges_round_trip(text: str) -> None:
    assert numa.core_ranges(numa.parse_core_ranges(f"{text}\n")) == text


BINDING = """
import json, os, sys, threading
from pathlib import Path
from megarl.platform import numa

ended = threading.Event()
threading.Thread(target=ended.wait).start()
numa.bind_rank(lambda: sys.argv[2:], Path(sys.argv[1]))
masks = [sorted(os.sched_getaffinity(int(task.name))) for task in Path("/proc/self/task").iterdir()]
ended.set()
# The second call must not share the first one's cores again.
numa.bind_rank(lambda: sys.argv[2:], Path(sys.argv[1]))
print(json.dumps({
    "masks": masks, "again": sorted(os.sched_getaffinity(0)), "notices": numa.notices(),
}))
"""


def bound(root: Path, gpus: Sequence[str], **variables: str) -> dict[str, Any]:
    """Bind a process to the first GPU of a machine, and return the affinity of its threads and its notices."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "SLURM_"))}
    environment |= {"LOCAL_RANK": "0", "HOME": str(root), **variables}
    done = subprocess.run(
        [sys.executable, "-c", BINDING, str(root), *gpus], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A machine of two nodes; the first node has all cores of this process, two GPUs and one of two adapters."""
    allowed = numa.core_ranges(os.sched_getaffinity(0))
    return machine(
        tmp_path, {0: allowed, 1: "9000-9003"}, {GPUS[0]: 0, GPUS[1]: 0}, {"mlx5_0": 0, "mlx5_1": 1}, threads=1
    )


def test_all_threads_of_a_rank_are_bound(small: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    half = allowed[: max(1, len(allowed) // 2)]
    found = bound(small, GPUS[:2], MEGARL_RANKS_TO_BIND="2")
    assert len(found["masks"]) > 1 and all(mask == half for mask in found["masks"]), found
    assert found["again"] == half
    assert found["notices"] == []


def test_ranks_that_are_not_to_be_bound_stay_as_they_are(small: Path) -> None:
    found = bound(small, GPUS[:2])
    assert found["again"] == sorted(os.sched_getaffinity(0))
    assert found["notices"] == []


def test_a_rank_that_cannot_be_bound_goes_on_with_a_notice(small: Path) -> None:
    write(small / f"bus/pci/devices/{GPUS[0]}/numa_node", "-1")
    found = bound(small, GPUS[:2], MEGARL_RANKS_TO_BIND="2")
    assert found["again"] == sorted(os.sched_getaffinity(0))
    assert found["notices"] == [f"ranks are not bound to NUMA nodes: {numa.UNKNOWN}"]


def test_what_cannot_be_read_is_a_notice(small: Path) -> None:
    write(small / "devices/system/node/node0/cpulist", "all")
    found = bound(small, GPUS[:2], MEGARL_RANKS_TO_BIND="2")
    assert found["again"] == sorted(os.sched_getaffinity(0))
    [notice] = found["notices"]
    assert notice.startswith("ranks are not bound to NUMA nodes: the places of GPUs cannot be read (")
