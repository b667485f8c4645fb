"""Reward processes on any node of a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
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


def nodes_in_turn() -> Iterator[str]:
    """The cluster's nodes, round-robin and without end."""
    return cycle([node["NodeID"] for node in ray.nodes() if node["Alive"]])


def actor_on(node: str, made: Callable[..., object], *given: object, **options: int) -> Any:
    """An actor `made(*given)` on a node, or on another where that is lost.

    It takes no CPU in Ray's count: all of those may be the ranks'. What asks for no resource at all Ray places at
    random, whatever the strategy; so it asks for a byte.
    """
    there = NodeAffinitySchedulingStrategy(node, soft=True)
    actor: Any = ray.remote(made).options(num_cpus=0, memory=1, scheduling_strategy=there, **options)
    return actor.remote(*given)


def on_nodes_in_turn() -> MakeScorer:
    """A constructor of reward workers, round-robin over the cluster's nodes."""
    nodes = nodes_in_turn()
    return lambda settings, log_file: RayRewardWorker(next(nodes), settings, log_file)


class RayRewardWorker:
    """A `RewardWorker` in an actor on a node; if the node is lost, Ray restarts it on another."""

    def __init__(self, node: str, settings: WorkerSettings, log_file: str | None) -> None:
        self._is_closed = False
        self._start_timeout_seconds = settings.start_timeout_seconds
        # Two calls at once: one of them interrupts the other.
        self._actor = actor_on(node, RewardWorker, settings, log_file, max_restarts=-1, max_concurrency=2)
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
