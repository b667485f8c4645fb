"""Training of the layers for multi-token prediction (MTP): targets, loss, and marks of parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.config import Recipe
from megarl.data.token_batch import TokenBatch
from megarl.models.drafts.embeddings import copy_embedding_to_last_stage
from megarl.models.drafts.mtp import mtp_head
from megarl.tracking.metric_rows import MetricRow
from megarl.training.model import ModelShard
from megarl.training.objective import Objective, RowLoss, StepNumbers
from megarl.training.parts.engine_part import EnginePart
from megarl.training.rows.feeds import RowFeed
from megarl.training.rows.metrics import Signal, mean_of
from megarl.training.rows.microbatch import Microbatch, tokens_ahead

METRICS = (
    MetricRow(
        "mtp/loss",
        "nats",
        "mean negative log-prob that the MTP layers give to a trained token, two positions ahead, or with "
        "trainer.mtp_targets distribution their KL from the policy's distribution of it",
        condition="trainer.mtp_loss_coefficient",
    ),
)

MTP_LOSS = Signal("mtp/loss", is_loss=True)


class MtpFeed(RowFeed):
    """Feed that gives the MTP layers the tokens to predict, and their loss the weights of these tokens.

    Position t has the values of the sequence's token t + 2. Each microbatch gets `mtp_mask`, True where this token is
    trained, and `mtp_weights`, zero elsewhere: [tokens] each.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def fetch(self, rows: Sequence[TokenBatch], batches: Sequence[Microbatch]) -> Sequence[Tensor]:
        return [self._add_targets(row, batch) for row, batch in zip(rows, batches, strict=True)]

    def _add_targets(self, row: TokenBatch, batch: Microbatch) -> Tensor:
        """Add mask and weights to a microbatch. Returns the labels [tokens] of this rank's part of the row."""
        assert batch.row.host_local is not None
        rank_indices = batch.row.host_local
        labels, batch.per_token["mtp_mask"], batch.per_token["mtp_weights"] = (
            torch.from_numpy(tokens_ahead(values, batch.lengths, batch.padded_lengths, distance=2)[rank_indices]).to(
                self._device
            )
            for values in (row.token_ids, row.loss_mask, row.per_token["token_weights"])
        )
        return labels

    def apply(self, chunk: torch.nn.Module, values: Tensor) -> None:
        if (head := mtp_head(chunk)) is not None:
            head.labels = values


class MtpPart(EnginePart):
    """The MTP layers of a trained model. Their gradient is not part of the policy's clipped norm."""

    def __init__(self, shard: ModelShard) -> None:
        self._shard = shard
        shard.update_feeds.append(MtpFeed(shard.device))
        for name, parameter in shard.parameters.items():
            if name.partition("mtp.layers.")[1]:
                # Megatron leaves parameters with this mark out of the gradient's norm.
                parameter.shared = True  # pyright: ignore[reportAttributeAccessIssue]  (a mark of Megatron's)

    def extend_objective(self, objective: Objective, recipe: Recipe) -> Objective:
        """Return the objective plus `trainer.mtp_loss_coefficient` times the loss of the MTP layers.

        The loss is the negative log-prob of the trained tokens, by the policy's token weights: the last row of the
        model's output. Metric: `mtp/loss`.
        """
        coefficient = recipe.trainer.mtp_loss_coefficient
        assert coefficient is not None

        def objective_and_mtp(output: Tensor, batch: Microbatch, numbers: StepNumbers) -> RowLoss:
            """Add the MTP loss of a row. In `output` [rows, tokens], the last row has the MTP layers' log-probs."""
            total, count, logged = objective(output[:-1], batch, numbers)
            mask, weights = batch.per_token["mtp_mask"], batch.per_token["mtp_weights"]
            losses = torch.where(mask, -output[-1], 0.0)
            return (
                total + coefficient * (losses * weights).sum(),
                count,
                logged | {MTP_LOSS: mean_of(losses, mask)},
            )

        return objective_and_mtp

    def prepare_update(self, rows: Sequence[TokenBatch]) -> None:
        copy_embedding_to_last_stage(self._shard.chunks)
