"""Which items belong to which step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class DataOrder:
    """An endless stream of item indices, cut into equal batches; the batch of a step is a function of (seed, step).

    The stream is one epoch after another, each holding every item once: in an order of its own with `shuffle`, else in
    the file's. A batch that meets the end of an epoch goes on into the next, so nothing is dropped. The step count is
    all the state there is.
    """

    num_items: int
    batch_size: int
    seed: int
    shuffle: bool = True

    def batch(self, step: int) -> list[int]:
        """Item indices of a step, counted from 0: [batch_size]."""
        start = step * self.batch_size
        first = start // self.num_items
        last = (start + self.batch_size - 1) // self.num_items
        stream = np.concatenate([self.epoch(epoch) for epoch in range(first, last + 1)])
        start -= first * self.num_items
        return stream[start : start + self.batch_size].tolist()

    def epochs(self, step: int) -> float:
        """Passes over the items by the end of a step, counted from 0."""
        return (step + 1) * self.batch_size / self.num_items

    def epoch(self, epoch: int) -> NDArray[np.int64]:
        """The items of an epoch, from 0, in its order: [num_items]."""
        if not self.shuffle:
            return np.arange(self.num_items)
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_items)
