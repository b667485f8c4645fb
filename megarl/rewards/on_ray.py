"""Reward processes on any node of a Ray cluster."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import cycle
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.rewards.scoring import START_TIMEOUT_SECONDS, MakeScorer, RewardWorker
from megarl.types import PeerLostError, Reward


def on_nodes_in_turn() -> MakeScorer:
    """Makes reward workers, each on the next of the cluster's nodes."""
    nodes = cycle([node["NodeID"] for node in ray.nodes() if node["Alive"]])
    return lambda *settings: RayRewardWorker(next(nodes), *settings)


class RayRewardWorker:
    """A `RewardWorker` that an actor keeps on a node; if that is lost, Ray starts it on another."""

    def __init__(self, node: str, functions: Sequence[str], correct_score: float, timeout_seconds: float) -> None:
        there = NodeAffinitySchedulingStrategy(node, soft=True)
        # It takes no CPU in Ray's count: all of those may be the ranks'.
        actor = ray.remote(_Keeper).options(num_cpus=0, scheduling_strategy=there, max_restarts=-1)
        self._is_closed = False
        self._actor: Any = actor.remote(os.getcwd(), list(sys.path), functions, correct_score, timeout_seconds)

    def ask(self, completion_text: str, answer: str) -> Reward:
        """See `Scorer.ask`. Raises PeerLostError if the cluster has no place for the actor any more."""
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while True:
            try:
                return ray.get(self._actor.ask.remote(completion_text, answer))
            except RayActorError as error:  # its node may be lost: Ray starts it elsewhere, and scoring can be repeated
                if self._is_closed or time.monotonic() > deadline:
                    raise PeerLostError(f"a reward worker on Ray is lost or closed: {error}") from None
                time.sleep(1.0)

    def close(self) -> None:
        """Kill the actor, and so its process."""
        self._is_closed = True
        with suppress(RayError):
            ray.kill(self._actor)


class _Keeper(RewardWorker):
    """The actor; the process it keeps is killed at a deadline, the actor stays."""

    def __init__(self, folder: str, path: list[str], *settings: Any) -> None:
        os.chdir(folder)
        sys.path[:] = path
        super().__init__(*settings)
