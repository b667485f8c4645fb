"""Interface of an optional part of a trained model, such as LoRA adapters or balancing losses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from megarl.config import Recipe
from megarl.data.token_batch import TokenBatch
from megarl.tracking.metrics import Metric
from megarl.training.objective import Objective


class EnginePart:
    """An optional part of a `TrainingEngine`. By default its methods do nothing.

    A part is built after the model's chunks, before they are wrapped with gradient buffers.
    """

    def extend_objective(self, objective: Objective, recipe: Recipe) -> Objective:
        """Return the objective plus this part's loss, a `Signal` with `is_loss`."""
        return objective

    def prepare_update(self, rows: Sequence[TokenBatch]) -> None:
        """Prepare for an update on this replica's rows. May be a collective."""

    def update_context(self) -> AbstractContextManager[None]:
        """Context of an update's forward and backward passes."""
        return nullcontext()

    def start_context(self) -> AbstractContextManager[None]:
        """Context in which the model computes as at the start of training."""
        return nullcontext()

    def update_metrics(self) -> dict[str, Metric]:
        """Return metrics of the newest update. May be a collective."""
        return {}
