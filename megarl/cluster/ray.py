"""Group of rank processes on a Ray cluster. Ray places and starts the ranks, which then connect to the driver.

Ray transports neither commands nor tensors, so a run is the same with every launcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import ray
import torch
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from megarl.cluster.connected import Address, ConnectedGroup, RemoteHandle, connect
from megarl.cluster.topology import Introduction, NodeKind
from megarl.cluster.worker_group import PartOfRun, WorkerGroup
from megarl.platform import chosen_device, numa
from megarl.platform.native_stacks import places_of_threads
from megarl.processes.process_tree import kill_tree
from megarl.types import ConfigError, PeerLostError

_SWITCHES_LABEL = "switches"
"""Label of Ray nodes (ray start --labels) listing the network switches above the node, from the root, joined by
dots.
"""
_ANSWER_SECONDS = 60.0
"""Seconds for a node to run a task. On a busy node the process that Ray starts for it needs over 10 s. Ray fails the
task sooner if it finds the node dead.
"""
_PLACING_SECONDS = 60.0
"""Seconds for Ray to reserve resources that the cluster has."""
_RESERVE_SECONDS = 10.0
"""Seconds for Ray to reserve resources on further nodes between two steps of a run."""


class _Process:
    """Ray actor. Its process runs one rank."""

    def serve(self, folder: str, address: Address, key: bytes, turn: int) -> None:
        """Run a rank in the driver's current `folder`, until the group ends. `turn` is the actor's index."""
        # A recipe's relative paths start from the driver's folder; Ray starts actors in another one.
        os.chdir(folder)
        here, host = ray.get_runtime_context(), ray.util.get_node_ip_address()
        switches = str(here.get_node_labels().get(_SWITCHES_LABEL) or "").split(".")
        gpus = tuple(int(number) for number in ray.get_gpu_ids())
        # Several Ray nodes may run on one host. The ID distinguishes them.
        node = _node_name(host, here.get_node_id())
        connect(address, key, Introduction(turn, node, host, tuple(filter(None, switches)), gpus, os.getpid()))


def _node_name(host: str, node_id: str) -> str:
    return f"{host} ({node_id[:8]})"


def _on_node(node_id: str, function: Callable[..., Any], *args: Any) -> Any:
    """Start a Ray task on a node, without reserving resources. Returns the reference of its result."""
    place = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(num_cpus=0, max_retries=0)(function).options(scheduling_strategy=place).remote(*args)


async def _answers(node_id: str) -> bool:
    """Return whether a node starts a process. Ray notices a dead node late; actors started there meanwhile never run.

    An empty ID stands for a dead node.
    """
    if not node_id:
        return False
    try:
        await asyncio.to_thread(ray.get, _on_node(node_id, ray.util.get_node_ip_address), timeout=_ANSWER_SECONDS)
    except RayError:
        return False
    return True


def _living() -> dict[str, str]:
    """Return the host of each living node, by the node's ID."""
    return {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}


def _id_of(name: str) -> str | None:
    """Return the ID of the living node with this name; None if there is none."""
    return next((node_id for node_id, host in _living().items() if _node_name(host, node_id) == name), None)


def _ids_of(names: Sequence[str]) -> list[str]:
    """Return the IDs of the living nodes with these names. A name whose ID has gone stands for all nodes of its host.

    A host gets a new ID whenever Ray is started on it again.
    """
    living = _living()
    by_name = {_node_name(host, node_id): node_id for node_id, host in living.items()}
    missing_names = {name.partition(" (")[0] for name in names if name not in by_name}
    return sorted(
        {by_name[name] for name in names if name in by_name}
        | {i for i, host in living.items() if host in missing_names}
    )


def join(address: str) -> None:
    """Connect this process to the Ray cluster at an address. Raises ConfigError if no cluster answers."""
    if ray.is_initialized():
        return
    # Ray would otherwise send usage statistics over the internet.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    on_term = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False, runtime_env=_runtime_environment())
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"cluster.ray_address = {address}: no Ray cluster answers there ({error}); start one with "
            "`ray start --head` or launch/slurm/ray.sbatch, or set cluster.launcher=local"
        ) from None
    finally:
        # ray.init (2.60) installs a handler that exits at once; the driver must save first.
        signal.signal(signal.SIGTERM, on_term)


def _runtime_environment() -> dict[str, str] | None:
    """Return the runtime environment of Ray's workers if the path of Python needs quotes, with a quoted path; else
    None.

    Ray 2.60 passes the path of Python to a shell as it is, so a path with a blank starts no worker.
    """
    quoted = shlex.quote(sys.executable)
    return None if quoted == sys.executable else {"py_executable": quoted}


class RayGroup(ConnectedGroup):
    """Group of rank processes, each a Ray actor, on the cluster at an address. Call `start` on a new object.

    The ranks of a node are consecutive. If the run has several groups, a group fills whole nodes, and its remaining
    ranks share one node. So the ranks of an engine share a node if they fit. Waits for nodes that the cluster lacks.
    Raises ConfigError, listing the present nodes, if they do not join. Ranks that replace lost ones start on the node
    of the lost ones, or if it is dead, on a node with free resources.
    """

    def __init__(
        self,
        world_size: int,
        address: str,
        kind: NodeKind,
        part: PartOfRun | None = None,
        *,
        avoided_nodes: Sequence[str] = (),
    ) -> None:
        """Create a group without processes. No rank is placed on `avoided_nodes`, named as in `topology`."""
        super().__init__(world_size, part, ranks_per_node=kind.ranks_per_node)
        self._address, self.kind, self._avoided = address, kind, avoided_nodes
        self._actors: list[Any] = []
        self._served: list[Any] = []
        self._bundles: list[tuple[Any, int]] = []
        """For each node its bundle of reserved resources: Ray's placement group, and the bundle's index in it."""
        self._bundle_sizes: list[int] = []
        """Number of ranks for which each bundle has resources."""
        self._device = "CPU"
        """Ray resource that each rank needs one of: GPU or CPU."""
        self._is_ending = False
        """Whether the driver itself has killed the actors."""

    def host(self) -> str:
        join(self._address)
        return ray.util.get_node_ip_address()

    async def launch(self, log_folder: Path, environment: Mapping[str, str], address: Address, key: bytes) -> None:
        if self._bundles:
            await self._await_room()
        else:
            self._device = "GPU" if self._needs_gpus(environment) else "CPU"
            await self._await_nodes()
            count = self.world_size
            sizes = [min(self.ranks_per_node, count - first) for first in range(0, count, self.ranks_per_node)]
            if not await self._add_bundles(sizes, _PLACING_SECONDS):
                raise PeerLostError(f"Ray did not place the run's ranks on nodes in {_PLACING_SECONDS:g} s")
        # Actors claim only what their bundle holds: GPUs, or CPUs.
        shares = {"num_gpus": 1, "num_cpus": 0} if self._device == "GPU" else {"num_gpus": 0, "num_cpus": 1}
        self._actors = [
            ray.remote(_Process)
            .options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(*self._bundles[self._node_of(place)]),
                runtime_env={"env_vars": self._rank_environment(environment)},
                **shares,
            )
            .remote()
            for place in self.new_places
        ]
        for turn, actor in enumerate(self._actors):
            self._served.append(actor.serve.remote(os.getcwd(), address, key, turn))

    def _needs_gpus(self, environment: Mapping[str, str]) -> bool:
        """Return whether each rank needs a GPU of the cluster: always with a GPU build of torch, even while only nodes
        without GPUs have joined.
        """
        if environment.get(chosen_device.VARIABLE) == "cpu":
            return False
        return bool(torch.version.cuda) or any(node["Resources"].get("GPU") for node in self._nodes())

    def _nodes(self) -> list[dict[str, Any]]:
        """Return Ray's records of the living nodes that this group may use."""
        avoided, resources = _ids_of(self._avoided), self.kind.ray_resources
        alive = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in avoided]
        return [n for n in alive if all(n["Resources"].get(name, 0.0) >= amount for name, amount in resources.items())]

    async def _await_nodes(self) -> None:
        """Wait until the cluster has enough nodes for the group. Raises ConfigError."""
        per_node, nodes, resources = self.kind.ranks_per_node, self.kind.nodes, self.kind.ray_resources
        if self.others():
            # The other groups have found their nodes, and some nodes may be lost.
            nodes = -(-self.world_size // per_node)
        deadline, reported = time.monotonic() + self.start_timeout_seconds, ""
        while True:
            have = sorted((int(node["Resources"].get(self._device, 0)) for node in self._nodes()), reverse=True)
            if sum(count >= per_node for count in have) >= nodes:
                break
            like = f" and {dict(resources)}" if resources else ""
            lack = (
                f"needs {nodes} nodes with {per_node} {self._device}s{like} each, the Ray cluster has nodes with {have}"
            )
            if time.monotonic() > deadline:
                section = "cluster.groups.engines" if self.kind.first_rank else "cluster"
                raise ConfigError(
                    f"{section}.nodes = {nodes}: {lack}; add nodes or lower {section}.nodes, {section}.ranks_per_node"
                )
            if lack != reported:
                _print(f"the run {lack}; waiting at most {self.start_timeout_seconds:g} s for more nodes")
            reported = lack
            await asyncio.sleep(1.0)

    async def _add_bundles(self, sizes: Sequence[int], seconds: float) -> bool:
        """Reserve resources for so many ranks on each of further nodes. Returns whether that succeeded in time."""
        avoided = [*_ids_of(self._avoided), *filter(None, self._nodes_of_bundles())]
        # STRICT_SPREAD puts each bundle on another node, so that only ranks of one bundle share a node.
        selectors: Any = [{"ray.io/node-id": f"!in({','.join(avoided)})"}] * len(sizes) if avoided else None
        placed = placement_group(
            [{self._device: count, **self.kind.ray_resources} for count in sizes],
            strategy="STRICT_SPREAD",
            bundle_label_selector=selectors,
        )
        try:
            await asyncio.to_thread(ray.get, placed.ready(), timeout=seconds)
        except RayError:
            remove_placement_group(placed)
            return False
        except BaseException:
            # The wait was cancelled.
            remove_placement_group(placed)
            raise
        self._bundles += [(placed, index) for index in range(len(sizes))]
        self._bundle_sizes += sizes
        return True

    def _nodes_of_bundles(self) -> list[str]:
        """Return the ID of each bundle's node; empty for a bundle whose node is dead."""
        alive = _living()
        tables = {placed.id: placement_group_table(placed)["bundles_to_node_id"] for placed, _ in self._bundles}
        node_names = [tables[placed.id].get(index) for placed, index in self._bundles]
        return [node if node in alive else "" for node in node_names]

    async def reserve(self, count: int, leaving: Collection[WorkerGroup] = (), num_further: int = 0) -> None:
        used = Counter(map(self._node_of, (*self.places, *self.taken_places())))
        nodes = dict(enumerate(self._nodes_of_bundles()))
        silent = {number for number, node in nodes.items() if not (used[number] or await _answers(node))}
        room = sum(self.ranks_per_node - used[number] for number in nodes if number not in silent)
        num_missing = count - self.world_size - room
        # If a node was free, Ray would have moved the bundle of a dead one there.
        if num_missing > 0 and silent:
            raise ConfigError(
                f"cluster.nodes: {count} ranks need another node in place of a lost one, and no node of the Ray "
                "cluster is free; add a node, or ask for fewer ranks"
            )
        sizes = [self.ranks_per_node] * -(-max(0, num_missing) // self.ranks_per_node)
        if sizes and not await self._add_bundles(sizes, _RESERVE_SECONDS):
            raise ConfigError(
                f"cluster.nodes: {count} ranks need {len(sizes)} further nodes of the Ray cluster with "
                f"{self.ranks_per_node} free {self._device}s each; add nodes, or ask for fewer ranks"
            )
        self._silent_nodes = silent

    async def _await_room(self) -> None:
        """Wait until the bundles of the missing ranks are on nodes that start processes.

        Ray moves the bundle of a dead node to another node with free resources. Raises PeerLostError if there is none
        in time.
        """
        deadline, is_reported = time.monotonic() + self.start_timeout_seconds, False
        count, numbers = self.ranks_per_node, {self._node_of(place) for place in self.new_places}
        while not all([await _answers(self._nodes_of_bundles()[number]) for number in numbers]):
            if time.monotonic() > deadline:
                raise PeerLostError(
                    f"no node of the Ray cluster replaces a lost one: none has {count} free {self._device}s; add a "
                    "node, or raise cluster.start_timeout_seconds"
                )
            if not is_reported and not all(self._nodes_of_bundles()):
                is_reported = True
                _print(
                    f"the run needs a node with {count} free {self._device}s in place of a lost one; waiting at most "
                    f"{self.start_timeout_seconds:g} s"
                )
            await asyncio.sleep(0.2)

    def _rank_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables of the actors.

        Ray may place ranks of several groups on one node, where each group sees only its own GPUs. Ranks of such runs
        get their cores by GPU, so that groups have different ones.
        """
        if numa.VARIABLE in environment and self.world_size < self.part.num_ranks:
            return {**environment, numa.VARIABLE: numa.BY_GPU}
        return dict(environment)

    async def await_end(self) -> str:
        # Not `ray.wait` in a thread: each group would block a thread of the pool until the run ends.
        turns = {asyncio.wrap_future(served.future()): turn for turn, served in enumerate(self._served)}
        for end in turns:
            # Errors after the first one are its consequences. asyncio would log each that nobody looked at.
            end.add_done_callback(lambda end: end.cancelled() or end.exception())
        waiting, how = set(turns), "Ray's actors ended"
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            failed = {turns[end]: error for end in done if (error := end.exception()) is not None}
            for turn, error in failed.items():
                if not isinstance(error, RayError):
                    raise error
                how = f"Ray's actors ended: {str(error).strip().splitlines()[-1]}"
                # Before all processes are connected, the others would wait for this one until the time limit.
                if self.keeps_survivors and self._remote_handles:
                    self.note_lost(turn)
                    continue
                # Actors killed by the driver fail here too; none of them is the first cause.
                if not self._is_ending:
                    self.note_first_end(turn)
                self.end_processes()
                return how
        return how

    def end_processes(self) -> None:
        self._is_ending = True
        for actor in self._actors:
            ray.kill(actor)
        for placed in {placed.id: placed for placed, _ in self._bundles}.values():
            with contextlib.suppress(RayError):
                remove_placement_group(placed)
        self._bundles, self._bundle_sizes = [], []

    def kill_process(self, handle: RemoteHandle) -> None:
        if not self.keeps_survivors:
            self.end_processes()
        elif not self._is_ending:
            ray.kill(self._actors[handle.turn])
            # A stopped process does not carry out Ray's request, so a task on its node kills it too.
            if (node := _id_of(handle.node)) is not None:
                _on_node(node, kill_tree, handle.process.pid)

    def places_of_threads(self, handle: RemoteHandle, seconds: float) -> str:
        try:
            if (node := _id_of(handle.node)) is None:
                return f"no native stacks: node {handle.node} has left the Ray cluster"
            # The process that Ray starts for the task needs a part of the time.
            return ray.get(_on_node(node, places_of_threads, handle.process.pid, seconds / 2), timeout=seconds)
        except RayError as error:
            return f"no native stacks: {error!r}"

    def taken_places(self, leaving: Collection[WorkerGroup] = ()) -> set[int]:
        per_node = self.ranks_per_node
        # A bundle may have resources for a part of a node's ranks.
        return {
            number * per_node + lacking
            for number, size in enumerate(self._bundle_sizes)
            for lacking in range(size, per_node)
        }

    def shares_nodes(self, group: WorkerGroup) -> bool:
        # Each group numbers the places in its own bundles.
        return False

    def _sibling(self, world_size: int, part: PartOfRun) -> Self:
        sibling = type(self)(world_size, self._address, self.kind, part, avoided_nodes=self._avoided)
        sibling._device = self._device
        # The sibling returns the reserved resources at its end.
        sibling._bundles, self._bundles = self._bundles, []
        sibling._bundle_sizes, self._bundle_sizes = self._bundle_sizes, []
        return sibling


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
