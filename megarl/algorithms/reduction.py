"""Weights of tokens in the aggregated loss, and the choice of the tokens with the highest entropy."""

from __future__ import annotations

import math

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
    """Return weights of the global batch's tokens, float32 [tokens]: the aggregated loss is sum(weights * loss).

    `cu_seqlens` int [sequences + 1] holds cumulative sequence lengths from 0 to tokens. `mask` bool [tokens] is True on
    trained tokens; weights are zero elsewhere. Means over sequences skip sequences without a trained token, unless
    `count_masked_sequences` is set (TRL's dr_grpo and grpo). A batch without trained tokens has only zeros. Modes:

    - `token_mean`: mean over all trained tokens (DAPO, arXiv 2503.14476, eq. 8)
    - `sequence_mean_token_mean`: mean over sequences of each sequence's mean (GRPO, arXiv 2402.03300, eq. 3)
    - `sequence_mean_token_sum`: mean over sequences of each sequence's sum
    - `constant_length`: mean over sequences of each sequence's sum / `constant_length` (Dr. GRPO, arXiv 2503.20783)
    - `sample_level`: `sequence_mean_token_mean` with `count_masked_sequences` (ColossalRL)

    Raises ValueError for another mode, or if `constant_length` is needed and not positive.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"aggregation = {mode!r}: is unknown; choose one of {', '.join(AGGREGATIONS)}")
    lengths = cu_seqlens.diff()
    sequence = sequence_of_tokens(cu_seqlens.to(mask.device), len(mask))
    # float64 counts are exact for any number of tokens; only the final weights are rounded to float32.
    num_trained = torch.zeros(len(lengths), dtype=torch.float64, device=mask.device)
    num_trained = num_trained.index_add(0, sequence, mask.to(torch.float64))
    num_sequences = (num_trained > 0).sum()
    if count_masked_sequences or mode == "sample_level":
        num_sequences = torch.tensor(len(lengths), device=mask.device)
    if mode == "token_mean":
        divisors = num_trained.sum().expand_as(mask)
    elif mode in ("sequence_mean_token_mean", "sample_level"):
        divisors = num_sequences * num_trained[sequence]
    elif mode == "sequence_mean_token_sum":
        divisors = num_sequences.expand_as(mask)
    else:
        if constant_length is None or constant_length <= 0:
            raise ValueError(
                f"aggregation constant_length needs a positive constant_length in tokens, not {constant_length}"
            )
        divisors = (num_sequences * constant_length).expand_as(mask)
    return torch.where(mask, 1.0 / divisors.clamp(min=1), 0.0).to(torch.float32)


def highest_entropy_mask(entropies: Tensor, mask: Tensor, *, share: float) -> tuple[Tensor, Tensor]:
    """Return the fraction `share` of tokens with the highest entropy, as mask bool [tokens], and their lowest entropy.

    `entropies` (nats) and `mask` are [tokens]; only tokens in `mask` count. The number of tokens is rounded up. Tokens
    with the same entropy as the last chosen token are included. Raises ValueError without a masked token.

    Source: Wang et al. 2025, "Beyond the 80/20 Rule" (arXiv 2506.01939, eq. 5), over the tokens of a batch. There the
    loss of each token has the factor I[H >= threshold]; the denominator counts all tokens.
    """
    masked_entropies = entropies[mask]
    if not len(masked_entropies):
        raise ValueError("highest_entropy_mask needs a token where `mask` is True")
    # Rounding puts a product such as 0.07 * 100 slightly above its whole number; 1e-9 avoids counting one more.
    count = max(1, math.ceil(share * len(masked_entropies) - 1e-9))
    threshold = torch.topk(masked_entropies, count, sorted=True).values[-1]
    return mask & (entropies >= threshold), threshold
