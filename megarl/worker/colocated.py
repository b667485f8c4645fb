"""Worker class of a rank that both trains and samples: trainer and engine alternate on one device."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.engine.engine import RolloutEngine
from megarl.models.configuration import uses_transformer_engine
from megarl.reshard.checks.ledger import RankChanges
from megarl.reshard.plan import RankTopology
from megarl.reshard.reshard_report import ReshardReport
from megarl.tracking.metrics import Metric
from megarl.types import Completion, Request
from megarl.worker.engine_builder import build_engine
from megarl.worker.reshard.planning import ReshardEnds
from megarl.worker.reshard.rank_reshard import RankReshard
from megarl.worker.trainer_worker import TrainerWorker


class Worker(TrainerWorker):
    """Worker of a training rank with a shard of a vLLM engine, if the recipe samples."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        recipe: Recipe,
        parallel: ParallelConfig,
        topology: RankTopology,
        frozen_parallel: ParallelConfig | None = None,
    ) -> None:
        """`parallel` has the trainer's parallel sizes, `frozen_parallel` those of frozen models with other sizes.

        `topology` has the nodes and switches of all ranks.
        """
        self._join_world(rank, world_size, recipe, parallel, topology, frozen_parallel)
        # Build the engine first, because vLLM needs free memory. Then let it sleep, to free memory for building the
        # models.
        self.engine: RolloutEngine | None = None
        if recipe.has_engine:
            self.engine = self._build_engine()
            self.engine.sleep()
        self._build_models()
        self.rank_reshard: RankReshard | None = None
        """Copies the policy's weights into the engine; None without an engine."""
        if self.engine is not None:
            reshard_ends = ReshardEnds(
                recipe=recipe,
                parallel=parallel,
                topology=topology,
                policy=self.policy,
                engine=self.engine,
                transformer_engine=uses_transformer_engine(),
                replica=self.engine.replica,
            )
            self.rank_reshard = RankReshard(reshard_ends)
            self.state.weight_version = self.engine.weight_version
            self.state.report_version = self._set_engine_version

    def _build_engine(self) -> RolloutEngine:
        return build_engine(self.recipe, self.state.parts)

    def reshard(self, verify: bool, version: int) -> ReshardReport:
        assert self.rank_reshard is not None
        report = self.rank_reshard.run(verify=verify, version=version)
        self.state.weight_version = version
        return report

    def advance(
        self,
        requests_and_aborts: tuple[Sequence[Request], Sequence[str]],
        budget_seconds: float,
        leave_after: int | None,
    ) -> list[Completion]:
        """Sample, and return the finished completions. Only for the first rank of a vLLM group.

        `requests_and_aborts` is (new requests, ids to abort). Returns after `budget_seconds` or `leave_after`
        completions.
        """
        assert self.engine is not None
        return self.engine.advance(*requests_and_aborts, budget_seconds, leave_after=leave_after)

    def engine_metrics(self) -> dict[str, Metric]:
        return self.engine.metrics() if self.engine else {}

    def start_notices(self) -> list[str]:
        return (
            super().start_notices()
            + (self.rank_reshard.notices if self.rank_reshard else [])
            + (self.engine.sleep_notices if self.engine else [])
        )

    def sleep_engine(self) -> RankChanges | None:
        """Free the engine's device memory for the trainer, until the next reshard.

        Returns the changes of the engine's weights since the last reshard; None if the weights were not recorded.
        """
        changes = None
        if self.engine:
            assert self.rank_reshard is not None
            # Compare before the sleep, because the sleep frees the weights.
            changes = self.rank_reshard.compare_weights()
            self.engine.sleep()
        # Load the policy after the engine sleeps: the device has no room for both.
        self.policy.onload()
        return changes

    def _set_engine_version(self, version: int) -> None:
        assert self.engine is not None
        self.engine.weight_version = version

    def close(self) -> None:
        if self.engine:
            self.engine.close()
        super().close()
