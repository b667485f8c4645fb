"""Selection of the tokens with the highest entropy, for losses learning from these alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def highest_entropy_mask(entropies: Tensor, mask: Tensor, *, share: float) -> tuple[Tensor, Tensor]:
    """Return a mask of the `share` of masked tokens with the highest entropy: bool [tokens], and the entropy threshold.

    `entropies` (nats) and `mask` are [tokens]. The result is False where the mask is False. The number of tokens is
    rounded up, and ties with the last one are included. Raises ValueError without a masked token.

    Source: Wang et al. 2025, "Beyond the 80/20 Rule" (arXiv 2506.01939, eq. 5). There the entropies are a batch's. The
    loss of each token has the factor I[H >= threshold]; the denominator counts all tokens.
    """
    masked_entropies = entropies[mask]
    if not len(masked_entropies):
        raise ValueError("no token is masked")
    # Rounding puts a product such as 0.07 * 100 slightly above its whole number; 1e-9 avoids counting one more.
    count = max(1, math.ceil(share * len(masked_entropies) - 1e-9))
    threshold = torch.topk(masked_entropies, count, sorted=True).values[-1]
    return mask & (entropies >= threshold), threshold
