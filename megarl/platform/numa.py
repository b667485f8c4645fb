"""Binding of ranks to the cores next to their GPUs, read from /sys.

Memory follows the cores, because Linux allocates a page on the NUMA node of the core that first writes to it. All
threads of a rank are bound before it allocates its buffers. A memory policy (set_mempolicy) would add nothing, and
Docker's default seccomp profile denies it.

NCCL chooses the network adapter nearest to each GPU. All ranks of a machine must choose alike (NVIDIA/nccl issue 1478),
but a rank may see only its own GPU. So NCCL's variables are not set.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

SYS = Path("/sys")

DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")
"""NVIDIA's driver has a folder here for each GPU, named by its PCI address."""

VARIABLE = "MEGARL_RANKS_TO_BIND"
"""Environment variable with the number of ranks on the node, or `BY_GPU`. A rank without it is not bound."""

BY_GPU = "by GPU"
"""Value of the variable for dividing the cores by all GPUs of the machine: other worker groups may use some."""

UNKNOWN = (
    "/sys does not name the NUMA nodes of their GPUs (numa_node is -1 or missing); cluster.bind_to_numa=false ends "
    "this notice"
)
"""Reason for not binding a rank: the machine, often a virtual one, does not say where the GPU is."""

OUTSIDE = (
    "no core of their GPUs' NUMA nodes is allowed to them (by Slurm, a cgroup or taskset); allow all cores of the node "
    "(Slurm: sbatch --exclusive), or set cluster.bind_to_numa=false"
)
"""Reason for not binding a rank: the job's cores and GPUs are on different NUMA nodes."""


class Place(NamedTuple):
    """The NUMA node and network adapters of a GPU, and the cores for the GPU's rank.

    `gpu` is a PCI address, for example 0000:0f:00.0. `cores` are numbers of logical CPUs. `adapters` are the InfiniBand
    and RoCE adapters on the GPU's NUMA node. `fault` is the reason for not binding the rank; there are no cores then.
    """

    gpu: str
    node: int | None
    cores: tuple[int, ...] = ()
    adapters: tuple[str, ...] = ()
    fault: str | None = None

    @property
    def description(self) -> str:
        """The place as text, for example `GPU 0000:0f:00.0, NUMA node 0, cores 0-11, adapters mlx5_0`."""
        node = f"GPU {self.gpu}, NUMA node {'unknown' if self.node is None else self.node}"
        if self.fault is not None:
            return f"{node}, not bound: {self.fault}"
        return f"{node}, cores {core_ranges(self.cores)}, adapters {', '.join(self.adapters) or 'none'}"


def places(gpus: Sequence[str], allowed: Collection[int], root: Path = SYS) -> list[Place]:
    """Return the place of each GPU, one rank per GPU. Ranks of one NUMA node share its allowed cores evenly.

    `gpus` are PCI addresses in the order of the ranks. `allowed` are the cores that the ranks may use together. `root`
    is the mount point of sysfs.
    """
    nodes = numa_nodes(root)
    adapters = adapter_nodes(nodes, root)
    node_of_gpu = [_node_of(root / "bus/pci/devices" / gpu_address, nodes) for gpu_address in gpus]
    gpu_places = []
    for gpu_index, (gpu_address, node) in enumerate(zip(gpus, node_of_gpu, strict=True)):
        if node is None:
            gpu_places.append(Place(gpu_address, None, fault=UNKNOWN))
            continue
        near_adapters = tuple(name for name, adapter_node in adapters.items() if adapter_node == node)
        usable_cores = nodes.get(node, frozenset()).intersection(allowed)
        if not usable_cores:
            gpu_places.append(Place(gpu_address, node, adapters=near_adapters, fault=OUTSIDE))
            continue
        index_in_node, ranks_on_node = node_of_gpu[:gpu_index].count(node), node_of_gpu.count(node)
        gpu_places.append(
            Place(
                gpu_address,
                node,
                _rank_cpus(physical_cores(usable_cores, root), index_in_node, ranks_on_node),
                near_adapters,
            )
        )
    return gpu_places


def numa_nodes(root: Path = SYS) -> dict[int, frozenset[int]]:
    folders = (root / "devices/system/node").glob("node[0-9]*")
    return {
        int(folder.name.removeprefix("node")): frozenset(parse_core_ranges((folder / "cpulist").read_text()))
        for folder in sorted(folders)
    }


def adapter_nodes(nodes: Mapping[int, Collection[int]], root: Path = SYS) -> dict[str, int | None]:
    """Return the NUMA node of each InfiniBand or RoCE adapter by name; None: unknown. `nodes` are the machine's NUMA
    nodes.
    """
    folders = (root / "class/infiniband").glob("*")
    # Sort by length first, so that mlx5_10 comes after mlx5_9.
    sorted_folders = sorted(folders, key=lambda folder: (len(folder.name), folder.name))
    return {folder.name: _node_of(folder / "device", nodes) for folder in sorted_folders}


def _node_of(device: Path, nodes: Mapping[int, Collection[int]]) -> int | None:
    """Return the NUMA node of a device, or the only one with CPUs; None: unknown."""
    try:
        number = int((device / "numa_node").read_text())
    except (OSError, ValueError):
        number = -1
    if number >= 0:
        return number
    # With one NUMA node the firmware often names none.
    nodes_with_cores = [node for node, cores in nodes.items() if cores]
    return nodes_with_cores[0] if len(nodes_with_cores) == 1 else None


def physical_cores(cores: Collection[int], root: Path = SYS) -> list[tuple[int, ...]]:
    """Group logical CPUs by physical core, so that a core's hardware threads stay together."""
    cpus_by_core: dict[int, list[int]] = {}
    for cpu in sorted(cores):
        siblings = root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        first_cpu = cpu
        with suppress(OSError, ValueError):
            first_cpu = min(parse_core_ranges(siblings.read_text()), default=cpu)
        cpus_by_core.setdefault(first_cpu, []).append(cpu)
    return [tuple(group) for group in cpus_by_core.values()]


def _rank_cpus(groups: Sequence[tuple[int, ...]], index: int, count: int) -> tuple[int, ...]:
    """Return the logical CPUs of rank `index` of `count`. `groups` has the logical CPUs of each physical core.

    Ranks share a core only if there are too few cores.
    """
    first_core = index * len(groups) // count
    end_core = max((index + 1) * len(groups) // count, first_core + 1)
    return tuple(sorted(cpu for group in groups[first_core:end_core] for cpu in group))


def parse_core_ranges(text: str) -> list[int]:
    """Parse the kernel's lists of cores, such as 0-3,8. Raises ValueError for another format."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first_core, _, last_core = part.partition("-")
        cores += range(int(first_core), int(last_core or first_core) + 1)
    return cores


def core_ranges(cores: Collection[int]) -> str:
    """Return cores in the kernel's format, such as 0-3,8."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and ranges[-1][1] == core - 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ranges)


@cache
def allowed_cores() -> frozenset[int]:
    """Return the cores that this process may use, as of the first call: later bindings do not change the result."""
    return frozenset(os.sched_getaffinity(0))


def gpu_addresses() -> list[str]:
    """Return the PCI addresses of the GPUs visible to this process, in CUDA's order."""
    import torch

    # torch's type stubs lack the PCI fields.
    properties: list[Any] = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0" for p in properties]


def rank_places(gpus: Sequence[str], root: Path = SYS, driver: Path = DRIVER_GPUS) -> list[Place]:
    """Return the places of this node's ranks, by local rank; empty: do not bind the ranks.

    `gpus` are the PCI addresses of the visible GPUs. With `BY_GPU` each GPU of the machine gets its share of the cores,
    so worker groups get different cores.
    """
    setting = os.environ.get(VARIABLE, "0")
    if setting != BY_GPU:
        return places(gpus[: int(setting)], allowed_cores(), root)
    all_gpus = sorted({*gpus, *machine_gpus(root, driver)})
    places_by_gpu = dict(zip(all_gpus, places(all_gpus, allowed_cores(), root), strict=True))
    return [places_by_gpu[gpu] for gpu in gpus]


def machine_gpus(root: Path = SYS, driver: Path = DRIVER_GPUS) -> list[str]:
    """Return the PCI addresses of all NVIDIA GPUs of this machine, including those hidden by CUDA_VISIBLE_DEVICES.

    If `driver` shows only this container's GPUs, other GPUs are left out.
    """
    # A container runtime may show the folder empty.
    if driver.is_dir() and any(driver.iterdir()):
        # In a container /sys shows all devices of the machine. NVIDIA's container runtime shows only the container's
        # GPUs here. Not tested in a container with some of the GPUs.
        return [folder.name.lower() for folder in driver.iterdir()]
    addresses = []
    for folder in (root / "bus/pci/devices").glob("*"):
        # A container may hide files of devices it does not use.
        with suppress(OSError):
            vendor, device_class = ((folder / name).read_text().strip() for name in ("vendor", "class"))
            # 0x10de is NVIDIA. Classes 0x03.... are display controllers, including GPUs without a display.
            if vendor == "0x10de" and device_class.startswith("0x03"):
                addresses.append(folder.name)
    return addresses


class _Binding:
    """Result of `bind_rank` in this process."""

    fault: str | None = None
    """Reason for not binding the rank; None: it was bound, or was not to be bound."""


def bind_rank(gpus: Callable[[], Sequence[str]] = gpu_addresses, root: Path = SYS) -> None:
    """Bind this rank's threads to the cores near its GPU, unless cluster.bind_to_numa = false.

    `gpus` returns the PCI addresses of the visible GPUs. Without binding the rank is only slower, so a failure is a
    notice.
    """
    if VARIABLE not in os.environ:
        return
    try:
        places_of_ranks, rank = rank_places(gpus(), root), int(os.environ.get("LOCAL_RANK", "0"))
        if rank >= len(places_of_ranks):
            return
        _Binding.fault = places_of_ranks[rank].fault
        if places_of_ranks[rank].fault is None:
            bind_threads(places_of_ranks[rank].cores)
    except OSError as error:
        # A sandbox may deny the call.
        _Binding.fault = f"the system refuses to bind threads to cores ({error.strerror})"
    except (ValueError, AttributeError) as error:
        # /sys of an unknown kernel, or a torch without PCI addresses.
        _Binding.fault = f"the places of GPUs cannot be read ({error})"


def bind_threads(cores: Collection[int]) -> None:
    """Bind all threads of this process to these cores. Later threads and child processes inherit the binding.

    Raises OSError if the system refuses.
    """
    for thread in Path("/proc/self/task").iterdir():
        # A thread may have ended since it was listed.
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)


def notices() -> list[str]:
    return [] if _Binding.fault is None else [f"ranks are not bound to NUMA nodes: {_Binding.fault}"]
