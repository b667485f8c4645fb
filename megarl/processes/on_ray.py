"""Processes answering requests on any node of a Ray cluster."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import cycle
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.processes.server_process import NO_LIMITS, MakeServer, RequestLimits, ServerProcess, ServerSettings
from megarl.types import PeerLostError


def round_robin_over_nodes() -> MakeServer:
    """Return a function creating processes on the nodes of the Ray cluster, one node after the other."""
    nodes = cycle([node["NodeID"] for node in ray.nodes() if node["Alive"]])
    return lambda settings, log_file: RayServerProcess(nodes, settings, log_file)


class RayServerProcess:
    """A process answering requests, in a Ray actor on the next of `nodes`. If its node is lost, the next one
    is used.
    """

    def __init__(self, nodes: Iterator[str], settings: ServerSettings, log_file: str | None) -> None:
        self._is_closed = False
        # No actor may be placed after `close`, because nobody would kill it.
        self._lock = threading.Lock()
        self._nodes, self._settings, self._log_file = nodes, settings, log_file
        self._actor = self._place_actor()

    def _place_actor(self) -> Any:
        # It takes no CPU in Ray's count, because the ranks may take all of them. Ray 2.60 places an actor without any
        # resource at random, ignoring the strategy. So the actor asks for one byte of memory.
        strategy = NodeAffinitySchedulingStrategy(next(self._nodes), soft=True)
        actor: Any = ray.remote(ServerProcess).options(num_cpus=0, memory=1, scheduling_strategy=strategy)
        return actor.remote(self._settings, self._log_file)

    def wait_until_ready(self) -> dict[str, Any]:
        """Wait until the process is ready, and return what it reports about itself.

        If its node is lost, the process is started on another node until `start_seconds` are over. Raises ConfigError
        if the process refuses or takes too long. Raises PeerLostError if it ends, if no node takes the actor in time,
        or if the actor's constructor fails.
        """
        deadline = time.monotonic() + self._settings.start_seconds
        while True:
            try:
                return ray.get(self._actor.wait_until_ready.remote())
            except RayActorError as error:
                # On another node the actor's constructor would fail again.
                if error.actor_init_failed:
                    raise PeerLostError(f"a process on Ray cannot be started: {error}") from None
                if time.monotonic() > deadline:
                    raise PeerLostError(f"a process on Ray is lost: {error}") from None
            # The actor's node is lost. Ray may take a moment to notice the loss.
            if not self._is_closed:
                time.sleep(1.0)
            with self._lock:
                if self._is_closed:
                    raise PeerLostError("the process on Ray was closed while it started")
                self._actor = self._place_actor()

    def request(self, message: Mapping[str, Any], limits: RequestLimits = NO_LIMITS) -> dict[str, Any]:
        try:
            return ray.get(self._actor.request.remote(dict(message), limits))
        except RayActorError as error:
            return {"lost": f"is lost on Ray: {error}"}

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            with suppress(RayError):
                ray.kill(self._actor)
