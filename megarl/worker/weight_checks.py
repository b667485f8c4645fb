"""Checks of the weights on a training rank: checksums by version, a canary batch, fingerprints of the whole state."""

from __future__ import annotations

from functools import cached_property

from megarl.checkpoint.drafter_files import drafter_layouts
from megarl.families.draft_layers import DRAFTER
from megarl.reshard.boxes import with_prefix
from megarl.reshard.checks.fingerprint import Fingerprint
from megarl.reshard.checks.ledger import Ledger, RankChanges, RankChecksums
from megarl.tracking.model_outputs import CanaryReport
from megarl.training.canary import compute_canary
from megarl.training.parts.drafter import DrafterPart
from megarl.training.state import checkpoint
from megarl.training.state.fingerprints import state_fingerprints
from megarl.worker.model_builder import ModelBuilder
from megarl.worker.rank_state import RankState
from megarl.worker.trainer_part import TrainerPart


class WeightChecks(TrainerPart):
    """Part that checks the policy's weights, and all contents of a checkpoint."""

    def __init__(self, state: RankState, builder: ModelBuilder) -> None:
        self._state, self._builder = state, builder

    def finish_build(self) -> None:
        if self._state.recipe.weights.check_every:
            self.take_checksums(version=1)

    @cached_property
    def ledger(self) -> Ledger:
        """Checksums of the policy's weights, as exported. Only runs with weights.check_every make it."""
        policy, rank = self._state.policy, self._state.rank
        layout = self._builder.layouts(policy.shape)[rank]
        if (part := policy.find_part(DrafterPart)) is not None:
            # Both models have tensors of the same names, such as lm_head.weight, so prefix the drafter's.
            layout += with_prefix(drafter_layouts(part.shape, self._builder.parallel)[rank], box_prefix=DRAFTER)
        return Ledger(f"trainer rank {rank}", layout, policy.weights)

    def take_checksums(self, version: int) -> RankChecksums:
        with self._state.policy.merging():
            return self.ledger.take_checksums(version)

    def newest_checksums(self) -> RankChecksums | None:
        return self.ledger.newest

    def forget_checksums(self) -> None:
        self.ledger.forget()

    def compare_weights(self) -> RankChanges | None:
        """Return the policy's weights that differ from their checksums. None if no checksums were taken."""
        with self._state.policy.merging():
            return self.ledger.find_changes()

    def compute_canary(self) -> CanaryReport:
        """Compute the canary, a fixed batch, twice with the policy; return the checksums of all module outputs."""
        return compute_canary(self._state.policy)

    def state_fingerprints(self, with_optimizer: bool) -> dict[str, Fingerprint]:
        """Return fingerprints of this rank's part of all tensors in a checkpoint, by name.

        Without `with_optimizer` only weights are included, not main weights and moments.
        """
        with self._state.saved_models() as models, checkpoint.load_changed_models(models):
            return state_fingerprints(models, with_optimizer=with_optimizer)
