"""Worker class of a rank that only holds copies of a training state, while processes leave a run."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.groups import world
from megarl.training.state.copies import StateCopies, hand_over


class CopyKeeper:
    """Temporary worker of each surviving process, after the old trainers ended and before new ones start.

    It holds the process's copies of the training state. Processes that the new parallel sizes do not need send their
    copies to those that stay, then exit.
    """

    def __init__(self, rank: int, world_size: int, timeout_seconds: float) -> None:
        """Join the torch world. `timeout_seconds` limits each collective."""
        world.initialize(timeout_seconds)
        self.copies = StateCopies()

    def inherit(self, copies: StateCopies) -> None:
        """Take over the copies that this process's earlier worker held."""
        self.copies = copies

    def hand_over(self, step: int, moves: Sequence[tuple[int, int, int]]) -> None:
        """Send copies of a step to other ranks: (rank that had the state, sender, receiver) for each. A collective."""
        hand_over(self.copies, step, moves)

    def abandon(self) -> StateCopies:
        """Leave the torch world. Returns the copies, for the next worker of this process."""
        world.leave()
        return self.copies
