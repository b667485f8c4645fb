"""Which rank plays which part: integers only.

Megatron's default order is tp fastest, then cp, then dp, then pp; vLLM's tensor-parallel groups are contiguous ranks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where one rank stands in the trainer's grid."""

    tp: int
    dp: int
    pp: int


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes of the trainer's grid and of the engines over the same world."""

    tp: int
    pp: int
    dp: int
    rollout_tp: int

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def num_replicas(self) -> int:
        """vLLM engines in the world."""
        return self.world_size // self.rollout_tp

    def coordinates(self, rank: int) -> Coordinates:
        """The trainer coordinates of a rank."""
        return Coordinates(tp=rank % self.tp, dp=rank // self.tp % self.dp, pp=rank // (self.tp * self.dp))

    def rank(self, tp: int, dp: int, pp: int) -> int:
        """The rank at these trainer coordinates."""
        return tp + self.tp * (dp + self.dp * pp)

    def replica(self, rank: int) -> int:
        """The vLLM engine a rank belongs to."""
        return rank // self.rollout_tp

    def leaders(self) -> tuple[int, ...]:
        """The ranks that own an engine's scheduler: the first of each vLLM group."""
        return tuple(range(0, self.world_size, self.rollout_tp))
