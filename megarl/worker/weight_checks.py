"""Checks of the weights on a training rank: checksums by version, a canary batch, fingerprints of the whole state."""

from __future__ import annotations

from functools import cached_property

from megarl.reshard.boxes import Layout
from megarl.reshard.checks.ledger import Ledger, RankChanges, RankChecksums
from megarl.tracking.model_outputs import CanaryReport
from megarl.training.canary import compute_canary
from megarl.training.training_engine import TrainingEngine


class WeightChecks:
    """Checks that the driver calls. `layout` is the layout of the policy's weights on this rank."""

    def __init__(self, policy: TrainingEngine, layout: Layout, rank: int) -> None:
        self._policy, self._layout, self._rank = policy, layout, rank

    @cached_property
    def ledger(self) -> Ledger:
        """Checksums of the policy's weights, as exported. It is made only for runs with weights.check_every."""
        return Ledger(f"trainer rank {self._rank}", self._layout, self._policy.weights)

    def take_checksums(self, version: int) -> RankChecksums:
        """Compute, store and return the checksums of the policy's weights, which are of this version."""
        with self._policy.merged():
            return self.ledger.take(version)

    def newest_checksums(self) -> RankChecksums | None:
        """Return the checksums taken last; None if the newest version has none."""
        return self.ledger.newest

    def forget_checksums(self) -> None:
        """Drop the checksums of a version that has changed since."""
        self.ledger.forget()

    def compare_weights(self) -> RankChanges | None:
        """Return which of the policy's weights differ from their checksums. None: no checksums were taken."""
        with self._policy.merged():
            return self.ledger.compare()

    def compute_canary(self) -> CanaryReport:
        """Compute the canary batch twice with the policy, and return the checksums of all module outputs."""
        return compute_canary(self._policy)
