"""Token weights of a minibatch, by the aggregation named in the recipe."""

from __future__ import annotations

import torch

from megarl.algorithms.reduction import token_weights
from megarl.config import AlgorithmConfig
from megarl.data.token_batch import TokenBatch


def assign_token_weights(batch: TokenBatch, algorithm: AlgorithmConfig, constant_length: int | None = None) -> None:
    """Set a minibatch's `token_weights` [tokens]: the factor of each token's loss in the minibatch's total loss.

    All segments of a sample count together, as one sequence of `algorithms.reduction.token_weights`.
    """
    # For the whole minibatch at once, so the loss does not depend on its split into ranks and microbatches.
    weights = token_weights(
        torch.from_numpy(batch.cu_samples),
        torch.from_numpy(batch.loss_mask),
        algorithm.aggregation,
        constant_length=constant_length,
        count_masked_sequences=algorithm.count_masked_sequences,
    )
    batch.per_token["token_weights"] = weights.numpy()
