"""One rank's part in weight transfers to separate engines: its cross-world group, copies, and losses of peers."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.groups.cross_world import join_group, leave_group
from megarl.groups.peer_errors import loss_report
from megarl.groups.rendezvous import Meeting
from megarl.platform import background
from megarl.reshard.plan import RankTopology
from megarl.worker.weight_copier import WeightCopier

if TYPE_CHECKING:
    from megarl.engine.engine import RolloutEngine
    from megarl.training.training_engine import Snapshot, TrainingEngine

Report = Mapping[str, Any]
"""Seconds and bytes of a transfer by name. After a loss: `lost`, the reason, and `missing`, ranks that never joined."""


class RankTransfer:
    """A rank's part in the weight transfers between worlds. The rank has either the `policy` or an `engine`.

    With a `snapshot` of the policy, its copy is sent. The policy may then be trained during the transfer.
    `transformer_engine` says whether the trainer uses Transformer Engine's layers; None on ranks with an engine.
    `replica` is the engine's number.

    A lost peer is reported and not raised: this rank is sound and can join the next cross-world group. Errors of this
    rank are raised.
    """

    def __init__(
        self,
        recipe: Recipe,
        layout: ParallelConfig,
        own_rank: int,
        *,
        policy: TrainingEngine | None = None,
        snapshot: Snapshot | None = None,
        engine: RolloutEngine | None = None,
        transformer_engine: bool | None = None,
        replica: int = 0,
    ) -> None:
        self._recipe, self._own_rank, self._snapshot = recipe, own_rank, snapshot
        self._ends: dict[str, Any] = {
            "recipe": recipe,
            "layout": layout,
            "policy": policy if snapshot is None else None,
            "snapshot": snapshot,
            "engine": engine,
            "transformer_engine": transformer_engine,
            "replica": replica,
        }
        self._group: dist.ProcessGroup | None = None
        self.copier: WeightCopier | None = None
        """This rank's end of the planned copies; None outside of a cross-world group."""
        self._sending: Future[dict[str, float]] | None = None

    def join(self, meeting: Meeting, topology: RankTopology, version: int) -> Report:
        """Join a cross-world group and send or receive the weights of this version. `topology` describes its ranks.

        A collective of all its ranks; leaves an earlier group first.
        """
        self.leave()
        if self._snapshot is not None:
            self._snapshot.take(version)
        try:
            self._group = join_group(meeting, self._own_rank, self._recipe.cluster.collective_timeout_seconds)
            self.copier = WeightCopier(topology=topology, group=self._group, version=version, **self._ends)
        except Exception as error:
            return self._report_loss(error)
        return self.copier.first_report

    def run(self, verify: bool, version: int) -> Report:
        """Send or receive the weights of this version; see `WeightCopier.run`."""
        assert self.copier is not None
        if self._snapshot is not None:
            self._snapshot.take(version)
        try:
            return self.copier.run(verify=verify, version=version)
        except Exception as error:
            return self._report_loss(error)

    def start(self, verify: bool, version: int) -> None:
        """Copy the policy's weights, and start sending the copy in the background with this version.

        The rank stays free for other calls, except calls using the cross-world group: `finish` must come first.
        """
        assert self.copier is not None and self._snapshot is not None and self._sending is None
        self._snapshot.take(version)

        def send() -> dict[str, float]:
            assert self.copier is not None
            try:
                return self.copier.run(verify=verify, version=version)
            except BaseException as error:
                # Leave the group, so that peers waiting for this rank fail too. The traceback's frames refer to the
                # group and would keep it open, so clear them first.
                traceback.clear_frames(error.__traceback__)
                self.leave()
                raise

        self._sending = background.begin(send)

    def finish(self) -> Report:
        """Wait for the sending begun by `start`, and return its report."""
        assert self._sending is not None
        sending, self._sending = self._sending, None
        try:
            return background.finish(sending)
        except Exception as error:
            return self._report_loss(error)

    def leave(self) -> None:
        """Leave the cross-world group, if there is one."""
        leave_group(self._group)
        self.copier = self._group = None

    def _report_loss(self, error: Exception) -> Report:
        """Leave the group after another rank left it, so that peers waiting for this rank fail too."""
        report = loss_report(error)
        self.leave()
        return report
