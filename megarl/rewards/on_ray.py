"""Reward processes on any node of a Ray cluster."""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import cycle
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.rewards.calling import Sample
from megarl.rewards.scoring import MakeScorer
from megarl.rewards.worker import RewardWorker, Scored, WorkerSettings
from megarl.types import PeerLostError


def on_nodes_in_turn() -> MakeScorer:
    """A constructor of reward workers, round-robin over the cluster's nodes."""
    nodes = cycle([node["NodeID"] for node in ray.nodes() if node["Alive"]])
    return lambda settings, log_file: RayRewardWorker(next(nodes), settings, log_file)


class RayRewardWorker:
    """A `RewardWorker` in an actor on a node; if the node is lost, Ray restarts it on another."""

    def __init__(self, node: str, settings: WorkerSettings, log_file: str | None) -> None:
        there = NodeAffinitySchedulingStrategy(node, soft=True)
        # It takes no CPU in Ray's count: all of those may be the ranks'. What asks for no resource at all Ray places at
        # random, whatever the strategy; so it asks for a byte.
        # Two calls at once: one of them interrupts the other.
        options = {"num_cpus": 0, "memory": 1, "max_restarts": -1, "max_concurrency": 2}
        actor = ray.remote(RewardWorker).options(scheduling_strategy=there, **options)
        self._is_closed = False
        self._start_timeout_seconds = settings.start_timeout_seconds
        self._actor: Any = actor.remote(settings, log_file)
        self._interrupting: Any = None

    def ask(self, sample: Sample) -> Scored:
        """See `RewardWorker.ask`. Raises PeerLostError also if the cluster has no room for the actor any more."""
        deadline = time.monotonic() + self._start_timeout_seconds
        if self._interrupting is not None:  # it is not for this sample
            with suppress(RayError):
                ray.get(self._interrupting)
            self._interrupting = None
        while True:
            try:
                return ray.get(self._actor.ask.remote(sample))
            except RayActorError as error:  # its node may be lost: Ray starts it elsewhere, and scoring can be repeated
                if self._is_closed or time.monotonic() > deadline:
                    raise PeerLostError(f"a reward worker on Ray is lost or closed: {error}") from None
                time.sleep(1.0)

    def interrupt(self) -> None:
        """See `RewardWorker.interrupt`."""
        with suppress(RayError):
            self._interrupting = self._actor.interrupt.remote()

    def close(self) -> None:
        """Kill the actor; its reward process and all that it started end with it."""
        self._is_closed = True
        with suppress(RayError):
            ray.kill(self._actor)
