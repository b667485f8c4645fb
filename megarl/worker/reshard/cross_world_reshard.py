"""One rank's part in reshards to separate engines."""

from __future__ import annotations

import traceback
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.groups.cross_world import join_group, leave_group
from megarl.groups.peer_errors import LostPeer, report_loss
from megarl.groups.rendezvous import Meeting
from megarl.platform import background
from megarl.reshard.checks.ledger import RankChanges
from megarl.reshard.plan import RankTopology
from megarl.reshard.reshard_report import ReshardReport
from megarl.worker.reshard.planning import ReshardEnds
from megarl.worker.reshard.rank_reshard import RankReshard

if TYPE_CHECKING:
    from megarl.engine.engine import RolloutEngine
    from megarl.training.training_engine import Snapshot, TrainingEngine


class CrossWorldReshard:
    """One rank's part in reshards between the torch worlds of trainers and engines.

    A rank has either the `policy` or an `engine`. A `snapshot` of the policy is sent in its place, so that the policy
    can be trained meanwhile. `transformer_engine`: the trainer uses Transformer Engine's layers; None on ranks with an
    engine. `replica` is the engine's number.

    A lost peer is reported, not raised, because this rank can join the next process group. This rank's own errors are
    raised.
    """

    def __init__(
        self,
        recipe: Recipe,
        parallel: ParallelConfig,
        own_rank: int,
        *,
        policy: TrainingEngine | None = None,
        snapshot: Snapshot | None = None,
        engine: RolloutEngine | None = None,
        transformer_engine: bool | None = None,
        replica: int = 0,
    ) -> None:
        self._recipe, self._own_rank, self._snapshot = recipe, own_rank, snapshot
        self._reshard_ends = ReshardEnds(
            recipe=recipe,
            parallel=parallel,
            topology=(),
            policy=policy if snapshot is None else None,
            snapshot=snapshot,
            engine=engine,
            transformer_engine=transformer_engine,
            replica=replica,
        )
        self._group: dist.ProcessGroup | None = None
        self.rank_reshard: RankReshard | None = None
        """Executes this rank's share of the copies; None without a process group."""
        self._sending: Future[ReshardReport] | None = None
        self._unreported_changes: RankChanges | None = None
        """Changes of the engine's weights, detected before a reshard that failed because of a lost peer."""

    @property
    def notices(self) -> list[str]:
        return [] if self.rank_reshard is None else self.rank_reshard.notices

    def join_and_reshard(self, meeting: Meeting, topology: RankTopology, version: int) -> ReshardReport | LostPeer:
        """Join a process group of trainers and engines, and send or receive the weights of this version.

        `topology` has the nodes and switches of the group's ranks. An earlier group is left first. A collective of all
        ranks in the group.
        """
        self._store_changes()
        self.leave()
        if self._snapshot is not None:
            self._snapshot.copy_weights(version)
        try:
            self._group = join_group(meeting, self._own_rank, self._recipe.cluster.collective_timeout_seconds)
            reshard_ends = replace(self._reshard_ends, topology=topology, group=self._group)
            self.rank_reshard = RankReshard(reshard_ends, version=version)
        except Exception as error:
            return self._leave_and_report_loss(error)
        return self._with_changes(self.rank_reshard.first_report)

    def run_reshard(self, verify: bool, version: int) -> ReshardReport | LostPeer:
        """Send or receive the weights of this version. With `verify` they are compared afterwards."""
        assert self.rank_reshard is not None
        self._store_changes()
        if self._snapshot is not None:
            self._snapshot.copy_weights(version)
        try:
            return self._with_changes(self.rank_reshard.run(verify=verify, version=version))
        except Exception as error:
            return self._leave_and_report_loss(error)

    def start_sending(self, verify: bool, version: int) -> None:
        """Copy the policy's weights into the snapshot, and start sending the snapshot in the background.

        The rank can execute other calls meanwhile, but calls using the process group must wait for `finish_sending`.
        """
        assert self.rank_reshard is not None and self._snapshot is not None and self._sending is None
        self._snapshot.copy_weights(version)

        def send() -> ReshardReport:
            assert self.rank_reshard is not None
            try:
                return self.rank_reshard.run(verify=verify, version=version)
            except BaseException as error:
                # Leave the group, so that peers waiting for this rank fail too. First clear the traceback's frames,
                # because they refer to the group and would keep it open.
                traceback.clear_frames(error.__traceback__)
                self.leave()
                raise

        self._sending = background.begin(send)

    def finish_sending(self) -> ReshardReport | LostPeer:
        """Wait until the sending begun by `start_sending` is complete, and return its report."""
        assert self._sending is not None
        sending, self._sending = self._sending, None
        try:
            return background.finish(sending)
        except Exception as error:
            return self._leave_and_report_loss(error)

    def compare_weights(self) -> RankChanges | None:
        """Return the changes of the engine's weights since the last reshard; None if the weights were not recorded."""
        self._store_changes()
        changes, self._unreported_changes = self._unreported_changes, None
        return changes

    def _store_changes(self) -> None:
        """Store which of the engine's weights changed since the last update, before they are overwritten."""
        changes = self.rank_reshard.compare_weights() if self.rank_reshard is not None else None
        # Report the first changes, because they show when the fault began.
        if changes is not None and not (self._unreported_changes and self._unreported_changes.boxes):
            self._unreported_changes = changes

    def _with_changes(self, report: ReshardReport) -> ReshardReport:
        changes, self._unreported_changes = self._unreported_changes, None
        return replace(report, changes=changes)

    def leave(self) -> None:
        leave_group(self._group)
        self.rank_reshard = self._group = None

    def _leave_and_report_loss(self, error: Exception) -> LostPeer:
        """Leave the process group, so that peers waiting for this rank fail too."""
        report = report_loss(error)
        self.leave()
        return report
