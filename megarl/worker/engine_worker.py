"""The worker of a sampling rank: its shard of one engine replica, in a torch world of the replica's ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.engine.engine import RolloutEngine
from megarl.groups import world
from megarl.groups.rendezvous import Meeting
from megarl.reshard.plan import RankTopology
from megarl.tracking.metrics import Metric
from megarl.types import Completion, ExpertsHandle, Request
from megarl.worker.rank_transfer import RankTransfer, Report


class EngineWorker:
    """Methods called by the driver on a rank of a separate engine replica."""

    def __init__(self, rank: int, world_size: int, recipe: Recipe, layout: ParallelConfig, replica: int) -> None:
        """Initialize the replica's world and build the engine. `replica` is the engine's number."""
        world.initialize(recipe.cluster.collective_timeout_seconds)
        self._engine = build_engine(recipe)
        self._transfer = RankTransfer(recipe, layout, rank, engine=self._engine, replica=replica)

    def join(self, meeting: Meeting, topology: RankTopology, version: int) -> Report:
        """Join a cross-world group with the trainers and receive their weights; see `RankTransfer.join`."""
        return self._transfer.join(meeting, topology, version)

    def start_notices(self) -> list[str]:
        """Return start-up notices for the user about how this run is executed."""
        return self._transfer.copier.notices if self._transfer.copier else []

    def advance(
        self, work: tuple[Sequence[Request], Sequence[str]], budget_seconds: float, leave_after: int | None
    ) -> list[Completion]:
        """Step the engine: new requests and aborts in, finished completions out; see `colocated.Worker.advance`."""
        return self._engine.advance(*work, budget_seconds, leave_after=leave_after)

    def sampled_so_far(self, _: None) -> dict[str, int]:
        """Return the tokens sampled so far by each unfinished request, by id. Leaders only."""
        return self._engine.sampled_so_far()

    def engine_metrics(self) -> dict[str, Metric]:
        """Return the engine's metrics since the last call. Leaders only."""
        return self._engine.metrics()

    def reshard(self, verify: bool, version: int) -> Report:
        """Receive the trainers' weights of this version between two engine steps; see `RankTransfer.run`."""
        return self._transfer.run(verify, version)

    def close(self) -> None:
        """Close the engine; leave the cross-world group and this replica's world."""
        # The cross-world group first: trainers then fail fast instead of waiting for this rank.
        self._transfer.leave()
        self._engine.close()
        dist.destroy_process_group()


def build_engine(
    recipe: Recipe, keep_experts: Callable[[NDArray[np.integer[Any]]], ExpertsHandle] | None = None
) -> RolloutEngine:
    """Build this rank's shard of the recipe's engine. A collective over the world.

    `keep_experts` stores routed experts and returns their handle; see `RolloutEngine`.
    """
    rollout = recipe.rollout
    samplings = [source.recipe.rollout.sampling for source in recipe.sources]
    # One engine serves all sources. If any source truncates its distribution (top-p, top-k, min-p), the engine must be
    # built to record the candidate sets.
    if truncated := next((sampling for sampling in samplings if sampling.is_truncated), None):
        rollout = rollout.model_copy(update={"sampling": truncated})
    if recipe.trainer.router_replay:
        # Router replay trains with the experts chosen at sampling; vLLM 0.30 returns them only with this option.
        rollout = rollout.model_copy(update={"vllm": rollout.vllm | {"enable_return_routed_experts": True}})
    return RolloutEngine(
        recipe.model.folder,
        rollout,
        max_model_len=recipe.context_tokens,
        dtype=recipe.model.dtype,
        seed=recipe.seed,
        override=recipe.model.override_config,
        keep_experts=keep_experts,
    )
