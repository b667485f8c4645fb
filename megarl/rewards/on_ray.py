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
from megarl.rewards.reward_pool import MakeScorer
from megarl.rewards.reward_process import RewardWorker, Scored, WorkerSettings
from megarl.types import PeerLostError


def nodes_in_turn() -> Iterator[str]:
    """Return the cluster's nodes, round-robin and without end."""
    return cycle([node["NodeID"] for node in ray.nodes() if node["Alive"]])


def actor_on(node: str, made: Callable[..., object], *given: object, **options: int) -> Any:
    """Return an actor `made(*given)` on a node, or on another one if that node is lost.

    It takes no CPU in Ray's count, because the ranks may take all of them. Ray 2.60 places an actor without any
    resource at random, ignoring the strategy. So the actor asks for one byte of memory.
    """
    there = NodeAffinitySchedulingStrategy(node, soft=True)
    actor: Any = ray.remote(made).options(num_cpus=0, memory=1, scheduling_strategy=there, **options)
    return actor.remote(*given)


def on_nodes_in_turn() -> MakeScorer:
    """Return a constructor of reward workers, round-robin over the cluster's nodes."""
    nodes = nodes_in_turn()
    return lambda settings, log_file: RayRewardWorker(next(nodes), settings, log_file)


class RayRewardWorker:
    """A `RewardWorker` in an actor on a node. If the node is lost, Ray restarts it on another."""

    def __init__(self, node: str, settings: WorkerSettings, log_file: str | None) -> None:
        self._is_closed = False
        self._start_timeout_seconds = settings.start_timeout_seconds
        # Two concurrent calls, so that `interrupt` can run while `ask` does.
        self._actor = actor_on(node, RewardWorker, settings, log_file, max_restarts=-1, max_concurrency=2)
        self._interrupting: Any = None

    def ask(self, sample: Sample) -> Scored:
        """See `RewardWorker.ask`. Also raises PeerLostError if the cluster has no room for the actor any more."""
        deadline = time.monotonic() + self._start_timeout_seconds
        if self._interrupting is not None:  # It was meant for the previous sample.
            with suppress(RayError):
                ray.get(self._interrupting)
            self._interrupting = None
        while True:
            try:
                return ray.get(self._actor.ask.remote(sample))
            except RayActorError as error:  # If its node is lost, Ray restarts it elsewhere.
                if self._is_closed or time.monotonic() > deadline:
                    raise PeerLostError(f"a reward worker on Ray is lost or closed: {error}") from None
                time.sleep(1.0)

    def interrupt(self) -> None:
        """See `RewardWorker.interrupt`."""
        with suppress(RayError):
            self._interrupting = self._actor.interrupt.remote()

    def close(self) -> None:
        """Kill the actor. Its reward process and all descendants end with it."""
        self._is_closed = True
        with suppress(RayError):
            ray.kill(self._actor)
