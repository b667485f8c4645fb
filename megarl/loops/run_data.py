"""Data of a run: its sources of problems, its tokenizer, and the ledger of drawn records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.data.sampler import DataOrder
from megarl.datasets.reading import Dropped
from megarl.files.atomic import raise_storage_errors
from megarl.rollout.source import Source
from megarl.tracking.draws import DrawEvents, rewind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Data of a run. `draws_file` is the ledger of drawn records. `notify` prints a warning about it."""

    tokenizer: Tokenizer
    sources: Sequence[Source]
    """Sources of problems, in the order of the recipe."""
    dropped: Dropped
    """Records dropped because they are too long, by data source."""
    draws_file: Path
    notify: Callable[[str], object]

    def rewind_draws(self, num_events: int) -> None:
        """Cut a resumed run's ledger to the `num_events` events before its checkpoint. Raises StorageError.

        A notice reports missing events.
        """
        file = self.draws_file
        with raise_storage_errors(file):
            num_missing = rewind(file, num_events)
        if num_missing:
            self.notify(
                f"{file}: lacks {num_missing} of {num_events} events of the steps before; it was cut or removed, or an "
                "earlier version of megarl wrote none. Training is not affected, but megarl samples --account cannot "
                "prove these steps: restore the file from a copy, then resume again"
            )

    def write_draws(self, step: int, order: DataOrder, batch: Sequence[int]) -> None:
        """Write to the ledger that a step drew these items and trained on them. Raises StorageError.

        `batch` are the indices of `order` for the step, counted from 1. On-policy loops write their own events.
        """
        file, first_draw = self.draws_file, order.num_drawn_before(step - 1)
        if step > 1 and not file.exists():
            # The run began with a version of megarl that wrote no ledger for this loop.
            return
        # Each item drawn before has two events: drawn and used.
        events = DrawEvents(num_written=2 * first_draw)
        for draw, index in enumerate(batch, first_draw):
            events.add("drawn", "train", draw, index)
            events.add("used", "train", index)
        with raise_storage_errors(file):
            events.write(file, step, {"train": order.num_items}, num_open=0, too_long=self.dropped.total())
