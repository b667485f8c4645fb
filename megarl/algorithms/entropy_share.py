"""The tokens of highest entropy, where alone these learn from the reward."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def of_highest_entropy(entropies: Tensor, mask: Tensor, *, share: float) -> tuple[Tensor, Tensor]:
    """Which tokens are of the `share` of the masked ones with the highest entropy, and the lowest entropy among them.

    `entropies` in nats and `mask` are [tokens]; returns bool [tokens], False where the mask is, and a number. So many
    tokens are taken, rounded up, and those that tie with the last. Raises ValueError without a masked token.

    Source: Wang et al. 2025, "Beyond the 80/20 Rule" (arXiv 2506.01939, eq. 5), where the entropies are a batch's and
    the loss of each token has the factor I[H >= threshold], with the denominator of all tokens.
    """
    of_masked = entropies[mask]
    if not len(of_masked):
        raise ValueError("no token is masked")
    # A product such as 0.07 * 100 lies a rounding above the whole number that it is.
    count = max(1, math.ceil(share * len(of_masked) - 1e-9))
    threshold = torch.topk(of_masked, count, sorted=True).values[-1]
    return mask & (entropies >= threshold), threshold
