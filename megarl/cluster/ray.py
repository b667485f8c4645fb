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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.cluster.connected import Address, ConnectedGroup, connect
from megarl.cluster.topology import Introduction, NodeKind
from megarl.cluster.worker_group import PartOfRun
from megarl.platform import chosen_device, numa
from megarl.types import ConfigError, PeerLostError

_SWITCHES_LABEL = "switches"
"""Label of Ray nodes (ray start --labels) listing the network switches above the node, from the root, joined by
dots.
"""


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
        connect(address, key, Introduction(turn, node, host, tuple(filter(None, switches)), gpus))


def _node_name(host: str, node_id: str) -> str:
    return f"{host} ({node_id[:8]})"


def _ids_of(names: Sequence[str]) -> list[str]:
    """Return the IDs of the living nodes with these names. A name whose ID has gone stands for all nodes of its host.

    A host gets a new ID whenever Ray is started on it again.
    """
    living = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}
    by_name = {_node_name(host, node_id): node_id for node_id, host in living.items()}
    gone = {name.partition(" (")[0] for name in names if name not in by_name}
    return sorted(
        {by_name[name] for name in names if name in by_name} | {i for i, host in living.items() if host in gone}
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
    Raises ConfigError, listing the present nodes, if they do not join.
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
        super().__init__(world_size, part)
        self._address, self._kind, self._avoided = address, kind, avoided_nodes
        self._actors: list[Any] = []
        self._served: list[Any] = []
        self._placed: Any = None
        self._is_ending = False
        """Whether the driver itself has killed the actors."""

    def host(self) -> str:
        join(self._address)
        return ray.util.get_node_ip_address()

    async def launch(self, log_folder: Path, environment: Mapping[str, str], address: Address, key: bytes) -> None:
        per_node, nodes, others = self._kind.ranks_per_node, self._kind.nodes, self._kind.ray_resources
        deadline, reported = time.monotonic() + self.start_timeout_seconds, ""
        while True:
            avoided = _ids_of(self._avoided)
            alive = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["NodeID"] not in avoided]
            alive = [node for node in alive if all(node.get(name, 0.0) >= amount for name, amount in others.items())]
            # A GPU build of torch waits for nodes with GPUs, even while only CPU nodes have joined.
            has_gpus = torch.version.cuda or any(node.get("GPU") for node in alive)
            kind = "GPU" if has_gpus and environment.get(chosen_device.VARIABLE) != "cpu" else "CPU"
            have = sorted((int(node.get(kind, 0)) for node in alive), reverse=True)
            if sum(count >= per_node for count in have) >= nodes:
                break
            like = f" and {dict(others)}" if others else ""
            lack = f"needs {nodes} nodes with {per_node} {kind}s{like} each, the Ray cluster has nodes with {have}"
            if time.monotonic() > deadline:
                section = "cluster.groups.engines" if self._kind.first_rank else "cluster"
                raise ConfigError(
                    f"{section}.nodes = {nodes}: {lack}; add nodes or lower {section}.nodes, {section}.ranks_per_node"
                )
            if lack != reported:
                print(
                    f"the run {lack}; waiting at most {self.start_timeout_seconds:g} s for more nodes",
                    file=sys.stderr,
                    flush=True,
                )
            reported = lack
            await asyncio.sleep(1.0)
        places = [min(per_node, self.world_size - first) for first in range(0, self.world_size, per_node)]
        # STRICT_SPREAD puts each bundle on another node, so that only ranks of one bundle share a node.
        selectors: Any = [{"ray.io/node-id": f"!in({','.join(avoided)})"}] * len(places) if avoided else None
        self._placed = placement_group(
            [{kind: count, **others} for count in places], strategy="STRICT_SPREAD", bundle_label_selector=selectors
        )
        try:
            await asyncio.to_thread(ray.get, self._placed.ready(), timeout=60.0)
        except RayError as error:
            raise PeerLostError(f"Ray did not place the run's ranks on nodes: {error}") from None
        # Actors claim only what their bundle holds: GPUs, or CPUs.
        own = {"num_gpus": 1, "num_cpus": 0} if kind == "GPU" else {"num_gpus": 0, "num_cpus": 1}
        self._actors = [
            ray.remote(_Process)
            .options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._placed, rank // per_node),
                runtime_env={"env_vars": self._rank_environment(environment)},
                **own,
            )
            .remote()
            for rank in range(self.world_size)
        ]
        for turn, actor in enumerate(self._actors):
            self._served.append(actor.serve.remote(os.getcwd(), address, key, turn))

    def _rank_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables of the actors.

        Ray may place ranks of several groups on one node, where each group sees only its own GPUs. Ranks of such runs
        get their cores by GPU, so that groups have different ones.
        """
        if numa.VARIABLE in environment and self.world_size < self.part.num_ranks:
            return {**environment, numa.VARIABLE: numa.BY_GPU}
        return dict(environment)

    async def await_end(self) -> str:
        ended, _ = await asyncio.to_thread(ray.wait, self._served)
        try:
            ray.get(ended)
            await asyncio.to_thread(ray.wait, self._served, num_returns=len(self._served))
        except RayError as error:
            # Actors killed by the driver fail here too; none of them is the first cause.
            if not self._is_ending:
                self.note_first_end(self._served.index(ended[0]))
            self.end_processes()
            return f"Ray's actors ended: {str(error).strip().splitlines()[-1]}"
        return "Ray's actors ended"

    def end_processes(self) -> None:
        self._is_ending = True
        for actor in self._actors:
            ray.kill(actor)
        if self._placed is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(self._placed)
            self._placed = None
