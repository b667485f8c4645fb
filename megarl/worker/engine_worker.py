"""Worker class of a rank that only samples. It has a shard of one engine replica, in a torch world of the replica's
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.engine.engine import RolloutEngine
from megarl.groups import world
from megarl.groups.peer_errors import LostPeer
from megarl.groups.rendezvous import Meeting
from megarl.platform import numa
from megarl.reshard.checks.ledger import RankChanges
from megarl.reshard.plan import RankTopology
from megarl.reshard.reshard_report import ReshardReport
from megarl.tracking.metrics import Metric
from megarl.types import Completion, Request
from megarl.worker.engine_builder import build_engine
from megarl.worker.reshard.cross_world_reshard import CrossWorldReshard


class EngineWorker:
    """Worker of a rank of a separate vLLM engine replica. The driver calls its methods."""

    def __init__(self, rank: int, world_size: int, recipe: Recipe, parallel: ParallelConfig, replica: int) -> None:
        world.initialize(recipe.cluster.collective_timeout_seconds)
        self._engine = self._build_engine(recipe)
        self._cross_world_reshard = CrossWorldReshard(recipe, parallel, rank, engine=self._engine, replica=replica)

    def _build_engine(self, recipe: Recipe) -> RolloutEngine:
        return build_engine(recipe)

    def join_and_reshard(self, meeting: Meeting, topology: RankTopology, version: int) -> ReshardReport | LostPeer:
        """Join a process group with the trainers and receive their weights of this version."""
        return self._cross_world_reshard.join_and_reshard(meeting, topology, version)

    def start_notices(self) -> list[str]:
        return [*numa.notices(), *self._cross_world_reshard.notices]

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
        return self._engine.advance(*requests_and_aborts, budget_seconds, leave_after=leave_after)

    def sampled_so_far(self, _: None) -> dict[str, int]:
        return self._engine.sampled_so_far()

    def engine_metrics(self) -> dict[str, Metric]:
        return self._engine.metrics()

    def reshard(self, verify: bool, version: int) -> ReshardReport | LostPeer:
        """Receive the trainers' weights of this version. No engine step runs meanwhile."""
        return self._cross_world_reshard.run_reshard(verify, version)

    def compare_weights(self) -> RankChanges | None:
        return self._cross_world_reshard.compare_weights()

    def close(self) -> None:
        # Leave the group with the trainers first. Then they fail at once, and do not wait for this rank.
        self._cross_world_reshard.leave()
        self._engine.close()
        world.leave()
