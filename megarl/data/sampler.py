"""Which items (prompts, sequences) each step gets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class DataOrder:
    """An endless stream of item indices, cut into equal batches. The batch of a step is a function of (seed, step).

    The stream is one epoch after another; each epoch holds every item once. With `shuffle` each epoch has its own
    order, otherwise the file's order. A batch at the end of an epoch continues into the next, so no item is dropped.
    The step number is the only state.
    """

    num_items: int
    batch_size: int
    seed: int
    shuffle: bool = True

    def batch(self, step: int) -> list[int]:
        """Return the item indices of a step, counted from 0: [batch_size]."""
        start = step * self.batch_size
        first = start // self.num_items
        last = (start + self.batch_size - 1) // self.num_items
        stream = np.concatenate([self.epoch(epoch) for epoch in range(first, last + 1)])
        # `stream` begins with epoch `first`, so positions are relative to that epoch.
        start -= first * self.num_items
        return stream[start : start + self.batch_size].tolist()

    def epochs(self, step: int) -> float:
        """Return how many passes over the items are complete at the end of a step, counted from 0."""
        return (step + 1) * self.batch_size / self.num_items

    def epoch(self, epoch: int) -> NDArray[np.int64]:
        """Return the item indices of an epoch, counted from 0, in the epoch's order: [num_items]."""
        if not self.shuffle:
            return np.arange(self.num_items)
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_items)
