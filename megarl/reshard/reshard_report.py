"""A rank's report of a reshard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

# Only for annotations: benchmarks imitate ranks without torch.
if TYPE_CHECKING:
    from megarl.reshard.checks.ledger import RankChanges, RankChecksums


class MergeRounding(NamedTuple):
    """Rounding of merged weights on one rank: squared norms of the rounding error and of the merged update."""

    squared_error: float
    squared_update: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardReport:
    """Times, sizes and checks of one rank's part in a reshard."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by stage. `wire`: waiting for data. `meet`: waiting for the last rank. `verify`: the comparison."""
    num_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes by kind of copy: `local`, `sent`, `received`."""
    probe_gap: float | None = None
    """Mean distance, in nats, between the log-probs of trainer and engine; None if they were not compared."""
    rounding: MergeRounding | None = None
    """Rounding of the sent weights; None: this rank merged none."""
    ledger: RankChecksums | None = None
    """Checksums of the engine's new weights; None: not computed."""
    changes: RankChanges | None = None
    """Changes of the engine's old weights before this reshard; None: not compared."""
