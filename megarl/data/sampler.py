"""Assigns items (prompts, sequences) to steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class DataOrder:
    """An endless stream of item indices, cut into equal batches. The batch of a step depends on the step alone.

    The stream is one epoch after another; each epoch has every item once. With `shuffle` each epoch has its own order,
    otherwise the file's order. A batch at the end of an epoch continues into the next, so no item is dropped. Steps are
    counted from 0. The steps before `first_step` drew `num_drawn` items, in batches of any size.
    """

    num_items: int
    batch_size: int
    seed: int
    shuffle: bool = True
    first_step: int = field(default=0, kw_only=True)
    num_drawn: int = field(default=0, kw_only=True)

    def num_drawn_before(self, step: int) -> int:
        """Return the number of items drawn before a step. Raises ValueError for a step before `first_step`."""
        if step < self.first_step:
            raise ValueError(f"step {step} is before the first one of this order, {self.first_step}")
        return self.num_drawn + (step - self.first_step) * self.batch_size

    def batch(self, step: int) -> list[int]:
        """Return the item indices of a step: [batch_size]."""
        start = self.num_drawn_before(step)
        first_epoch = start // self.num_items
        last_epoch = (start + self.batch_size - 1) // self.num_items
        stream = np.concatenate([self.epoch(epoch) for epoch in range(first_epoch, last_epoch + 1)])
        # `stream` begins with epoch `first_epoch`, so positions are relative to that epoch.
        start -= first_epoch * self.num_items
        return stream[start : start + self.batch_size].tolist()

    def epochs(self, step: int) -> float:
        """Return the number of passes over the items at the end of a step."""
        return self.num_drawn_before(step + 1) / self.num_items

    def epoch(self, epoch: int) -> NDArray[np.int64]:
        """Return the item indices of an epoch (from 0) in its order: [num_items]."""
        if not self.shuffle:
            return np.arange(self.num_items)
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_items)
