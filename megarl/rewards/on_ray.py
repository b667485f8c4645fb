"""Reward processes on any node of a Ray cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from megarl.rewards.scoring import RewardWorker
from megarl.types import PeerLostError, Reward

_TRIES = 3


class RayRewardWorker:
    """A `RewardWorker` that an actor keeps on its node; Ray spreads actors, and starts a lost one on another node."""

    def __init__(self, functions: Sequence[str], correct_score: float, timeout_seconds: float) -> None:
        # It takes no CPU in Ray's count: all of those may be the ranks'.
        actor = ray.remote(_Keeper).options(num_cpus=0, scheduling_strategy="SPREAD", max_restarts=-1)
        self._actor: Any = actor.remote(os.getcwd(), list(sys.path), functions, correct_score, timeout_seconds)

    def ask(self, completion_text: str, answer: str) -> Reward:
        """See `Scorer.ask`. Raises PeerLostError if the cluster has no place for the actor any more."""
        for _ in range(_TRIES):
            try:
                return ray.get(self._actor.ask.remote(completion_text, answer))
            except RayActorError as error:  # its node may be lost; a completion can be scored again
                lost = error
        raise PeerLostError(f"Ray lost a reward worker {_TRIES} times: {lost}")

    def close(self) -> None:
        """Kill the actor, and so its process."""
        try:
            ray.kill(self._actor)
        except RayError:
            return


class _Keeper:
    """The actor; the process it keeps is killed at a deadline, the actor stays."""

    def __init__(
        self, folder: str, path: list[str], functions: Sequence[str], correct_score: float, timeout_seconds: float
    ) -> None:
        os.chdir(folder)
        sys.path[:] = path
        self._worker = RewardWorker(functions, correct_score, timeout_seconds)

    def ask(self, completion_text: str, answer: str) -> Reward:
        return self._worker.ask(completion_text, answer)
