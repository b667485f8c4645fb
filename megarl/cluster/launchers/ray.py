"""Nodes of a Ray cluster. Ray starts one agent on each, which then connects to the driver.

Ray transports neither commands nor tensors, so a run is the same with every launcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.cluster.agents.agent import connect
from megarl.cluster.agents.nodes import ConnectedNodes
from megarl.cluster.agents.topology import Introduction, NodeKind
from megarl.platform import chosen_device
from megarl.processes.launcher import LaunchedProgram, python_call
from megarl.processes.process_tree import die_with
from megarl.types import ConfigError, PeerLostError

_SWITCHES_LABEL = "switches"
"""Label of Ray nodes (ray start --labels) with the network switches above the node: root first, joined by dots."""
_PLACING_SECONDS = 60.0
"""Seconds for Ray to reserve resources that the cluster has."""
_RESERVE_SECONDS = 10.0
"""Seconds for Ray to reserve resources on further nodes during a run."""


class _Process:
    """Ray actor that starts the agent of one node."""

    def serve(self, path: Sequence[str], address: tuple[str, int], key: bytes, actor_index: int) -> None:
        """Run an agent until it ends. `actor_index` is the actor's index, `path` the driver's module search path."""
        context, host = ray.get_runtime_context(), ray.util.get_node_ip_address()
        switch_names = str(context.get_node_labels().get(_SWITCHES_LABEL) or "").split(".")
        gpus = tuple(int(gpu_id) for gpu_id in ray.get_gpu_ids())
        # Several Ray nodes may run on one host. The ID distinguishes them.
        node = _node_name(host, context.get_node_id())
        node_fields = [actor_index, node, host, list(filter(None, switch_names)), gpus]
        # The agent is a separate process: it forks from its main thread, and Ray runs this method in another one.
        agent = LaunchedProgram(
            python_call(
                "megarl.cluster.launchers.ray:main", json.dumps([*address]), json.dumps(node_fields), path=path
            ),
            secret=f"{key.hex()}\n".encode(),
        )
        # If Ray kills this process, its agent ends with it (`die_with`).
        agent.wait()


def _node_name(host: str, node_id: str) -> str:
    return f"{host} ({node_id[:8]})"


def _list_living_nodes() -> dict[str, str]:
    return {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}


def _find_node_id(name: str) -> str | None:
    return next((node_id for node_id, host in _list_living_nodes().items() if _node_name(host, node_id) == name), None)


def _find_node_ids(names: Sequence[str]) -> list[str]:
    """Return the IDs of living nodes by name. An unknown name stands for all nodes of its host.

    A host gets a new ID whenever Ray starts on it again.
    """
    living_nodes = _list_living_nodes()
    ids_by_name = {_node_name(host, node_id): node_id for node_id, host in living_nodes.items()}
    unknown_hosts = {name.partition(" (")[0] for name in names if name not in ids_by_name}
    return sorted(
        {ids_by_name[name] for name in names if name in ids_by_name}
        | {node_id for node_id, host in living_nodes.items() if host in unknown_hosts}
    )


def join(address: str) -> None:
    """Connect this process to a Ray cluster. Raises ConfigError if none answers."""
    if ray.is_initialized():
        return
    # Ray would otherwise send usage statistics over the internet.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    sigterm_handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False, runtime_env=_make_runtime_environment())
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"cluster.ray_address = {address}: no Ray cluster answers there ({error}); start one with "
            "`ray start --head` or launch/slurm/ray.sbatch, or set cluster.launcher=local"
        ) from None
    finally:
        # ray.init (2.60) installs a handler that exits at once; the driver must save first.
        signal.signal(signal.SIGTERM, sigterm_handler)


def _make_runtime_environment() -> dict[str, str] | None:
    """Return a runtime environment with the quoted path of Python; None if it needs no quotes.

    Ray 2.60 passes the path to a shell unquoted, so a path with a blank starts no worker.
    """
    quoted = shlex.quote(sys.executable)
    return None if quoted == sys.executable else {"py_executable": quoted}


class RayNodes(ConnectedNodes):
    """Nodes of a Ray cluster, each with an actor that holds the resources of all its ranks.

    Waits for missing nodes, and raises ConfigError if they do not join. A node with free resources replaces a lost one.
    """

    def __init__(
        self,
        kind: NodeKind,
        environment: Mapping[str, str],
        imports: Sequence[str],
        address: str,
        *,
        avoided_nodes: Sequence[str] = (),
    ) -> None:
        """Create the nodes without agents. None will be on `avoided_nodes`, named as in `topology`."""
        super().__init__(kind, environment, imports)
        self._address, self._avoided = address, avoided_nodes
        self._actors: list[Any] = []
        self._serve_futures: list[asyncio.Future[Any]] = []
        """Completes, for each actor, when its agent ends."""
        self._placement_groups: list[Any] = []
        self._device = "CPU"
        """Ray resource of which each rank needs one: GPU or CPU."""

    def host(self) -> str:
        join(self._address)
        return ray.util.get_node_ip_address()

    async def launch(self, address: tuple[str, int], key: bytes) -> int:
        self._device = "GPU" if self._needs_gpus() else "CPU"
        await self._await_nodes()
        if not await self._start_actors(self.kind.nodes, address, key, _PLACING_SECONDS):
            raise PeerLostError(f"Ray did not place the run's agents on nodes in {_PLACING_SECONDS:g} s")
        return self.kind.nodes

    async def launch_further(self, num_nodes: int, address: tuple[str, int], key: bytes) -> int:
        await self._release_dead_nodes()
        if not await self._start_actors(num_nodes, address, key, _RESERVE_SECONDS):
            raise ConfigError(
                f"cluster.nodes: {num_nodes} further nodes of the Ray cluster with {self.kind.ranks_per_node} free "
                f"{self._device}s each are needed; add nodes, or ask for fewer ranks"
            )
        return num_nodes

    async def _start_actors(self, num_nodes: int, address: tuple[str, int], key: bytes, seconds: float) -> bool:
        """Start an actor on each of `num_nodes` nodes without an agent. Return False if reserving exceeds `seconds`."""
        group = await self._reserve_nodes(num_nodes, seconds)
        if group is None:
            return False
        self._placement_groups.append(group)
        # Forget ended actors of earlier starts: they must not end the wait for a new agent.
        self._serve_futures = [served for served in self._serve_futures if not served.done()]
        for index in range(num_nodes):
            self._start_actor(PlacementGroupSchedulingStrategy(group, index), address, key)
        return True

    async def _reserve_nodes(self, num_nodes: int, seconds: float) -> Any | None:
        """Return a placement group: resources of nodes without an agent. None if Ray does not reserve them in time."""
        used_nodes = filter(None, map(_find_node_id, {agent.node for agent in self.agents if not agent.is_lost}))
        avoided_nodes = [*_find_node_ids(self._avoided), *used_nodes]
        selectors: Any = [{"ray.io/node-id": f"!in({','.join(avoided_nodes)})"}] * num_nodes if avoided_nodes else None
        # STRICT_SPREAD puts each bundle on another node.
        group = placement_group(
            [{self._device: self.kind.ranks_per_node, **self.kind.ray_resources}] * num_nodes,
            strategy="STRICT_SPREAD",
            bundle_label_selector=selectors,
        )
        try:
            await asyncio.to_thread(ray.get, group.ready(), timeout=seconds)
        except RayError:
            remove_placement_group(group)
            return None
        except BaseException:
            # The wait was cancelled.
            remove_placement_group(group)
            raise
        return group

    def _start_actor(self, bundle: PlacementGroupSchedulingStrategy, address: tuple[str, int], key: bytes) -> None:
        # Actors claim only what their bundle holds: GPUs, or CPUs.
        claimed_resources = {"num_gpus": 0, "num_cpus": 0} | {f"num_{self._device.lower()}s": self.kind.ranks_per_node}
        make_actor: Any = ray.remote(_Process)
        actor = make_actor.options(scheduling_strategy=bundle, **claimed_resources).remote()
        actor_index = len(self._actors)
        self._actors.append(actor)
        serve_future = asyncio.wrap_future(actor.serve.remote(sys.path, address, key, actor_index).future())
        # Retrieve the error: asyncio would log it as never retrieved.
        serve_future.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._serve_futures.append(serve_future)

    async def _release_dead_nodes(self) -> None:
        """End the actors of nodes whose agents are lost, so that Ray frees their resources."""
        living_indices = {agent.introduction.turn for agent in self.agents if not agent.is_lost}
        for actor_index, actor in enumerate(self._actors):
            if actor_index not in living_indices:
                ray.kill(actor)

    def _needs_gpus(self) -> bool:
        """Return whether each rank needs a GPU.

        With a GPU build of torch it does, even while only nodes without GPUs have joined.
        """
        if self.environment.get(chosen_device.VARIABLE) == "cpu":
            return False
        return bool(torch.version.cuda) or any(node["Resources"].get("GPU") for node in self._list_usable_nodes())

    def _list_usable_nodes(self) -> list[dict[str, Any]]:
        """Return Ray's records of the living nodes that the run may use."""
        avoided, resources = _find_node_ids(self._avoided), self.kind.ray_resources
        alive = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in avoided]
        return [n for n in alive if all(n["Resources"].get(name, 0.0) >= amount for name, amount in resources.items())]

    async def _await_nodes(self) -> None:
        """Wait until the cluster has enough nodes. Raises ConfigError after the start's time limit."""
        ranks_per_node, num_nodes, resources = self.kind.ranks_per_node, self.kind.nodes, self.kind.ray_resources
        deadline, reported_shortage = time.monotonic() + self._timeout_seconds, ""
        while True:
            counts_by_node = sorted(
                (int(node["Resources"].get(self._device, 0)) for node in self._list_usable_nodes()), reverse=True
            )
            if sum(count >= ranks_per_node for count in counts_by_node) >= num_nodes:
                return
            resources_text = f" and {dict(resources)}" if resources else ""
            shortage_text = (
                f"needs {num_nodes} nodes with {ranks_per_node} {self._device}s{resources_text} each, the Ray cluster "
                f"has nodes with {counts_by_node}"
            )
            if time.monotonic() > deadline:
                section = "cluster.groups.engines" if self.kind.first_rank else "cluster"
                raise ConfigError(
                    f"{section}.nodes = {num_nodes}: {shortage_text}; add nodes or lower {section}.nodes, "
                    f"{section}.ranks_per_node"
                )
            # Print each shortage once: the loop looks every second.
            if shortage_text != reported_shortage:
                _print(f"the run {shortage_text}; waiting at most {self._timeout_seconds:g} s for more nodes")
            reported_shortage = shortage_text
            await asyncio.sleep(1.0)

    async def await_end(self) -> str:
        ended_actors, _ = await asyncio.wait(self._serve_futures, return_when=asyncio.FIRST_COMPLETED)
        error = ended_actors.pop().exception()
        return "an actor of Ray ended" + ("" if error is None else f": {str(error).strip().splitlines()[-1]}")

    async def end_agents(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        for group in self._placement_groups:
            with contextlib.suppress(RayError):
                remove_placement_group(group)


def main(address: str, node_fields: str) -> None:
    """Run the agent of a Ray node as a child of the actor. The key is on standard input."""
    die_with(os.getppid())
    key = bytes.fromhex(sys.stdin.readline())
    actor_index, node, host, switches, gpus = json.loads(node_fields)
    driver_host, port = json.loads(address)
    connect((driver_host, port), key, Introduction(actor_index, node, host, tuple(switches), tuple(gpus), os.getpid()))


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
