"""The aggregation of token losses as one weight per token of the global batch."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.sequences import sequence_of_tokens

AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length", "sample_level")


def token_weights(
    cu_seqlens: Tensor,
    mask: Tensor,
    mode: str,
    *,
    constant_length: int | None = None,
    count_masked_sequences: bool = False,
) -> Tensor:
    """Weights of the global batch's tokens: the aggregated loss is sum(weights * loss), however the batch is split.

    `cu_seqlens` int [sequences + 1], cumulative sequence lengths from 0 to tokens; `mask` bool [tokens], True on tokens
    to train. Returns float32 [tokens], zero where the mask is False. The number of sequences that a mean divides by
    leaves out those without a trained token, unless `count_masked_sequences` is set (TRL's dr_grpo and grpo). A batch
    without a trained token has only zeros. Modes:
    `token_mean` over all trained tokens (DAPO, arXiv 2503.14476, eq. 8);
    `sequence_mean_token_mean` over the sequences' own means (GRPO, arXiv 2402.03300, eq. 3);
    `sequence_mean_token_sum` over the sequences' sums;
    `constant_length` likewise, each sum divided by `constant_length` tokens (Dr. GRPO, arXiv 2503.20783);
    `sample_level` as `sequence_mean_token_mean` with `count_masked_sequences` (ColossalRL).
    Raises ValueError for another mode, or where `constant_length` is needed and not positive.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"unknown aggregation {mode!r}: choose one of {', '.join(AGGREGATIONS)}")
    lengths = cu_seqlens.diff()
    sequence = sequence_of_tokens(cu_seqlens.to(mask.device), len(mask))
    trained = torch.zeros(len(lengths), dtype=torch.float64, device=mask.device)
    trained = trained.index_add(0, sequence, mask.to(torch.float64))
    num_sequences = (trained > 0).sum()
    if count_masked_sequences or mode == "sample_level":
        num_sequences = torch.tensor(len(lengths), device=mask.device)
    if mode == "token_mean":
        divisors = trained.sum().expand_as(mask)
    elif mode in ("sequence_mean_token_mean", "sample_level"):
        divisors = num_sequences * trained[sequence]
    elif mode == "sequence_mean_token_sum":
        divisors = num_sequences.expand_as(mask)
    else:
        if constant_length is None or constant_length <= 0:
            raise ValueError(f"aggregation constant_length needs a positive length in tokens, not {constant_length}")
        divisors = (num_sequences * constant_length).expand_as(mask)
    return torch.where(mask, 1.0 / divisors.clamp(min=1), 0.0).to(torch.float32)
