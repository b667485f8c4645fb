"""Root-mean-square norms of the local spec, plain and zero-centred."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """y = x / rms(x) * weight over the last dimension (arXiv:1910.07467, eq. 4), computed in float32 or wider.

    With the config's `layernorm_zero_centered_gamma` the factor is 1 + weight, in float32: the stored weight would lose
    bits. Under sequence parallelism each tensor-parallel rank normalises its own tokens, and Megatron sums the weight's
    gradient (attribute `sequence_parallel`). Megatron-Core 0.16.1's local norm supports neither.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        initial = torch.zeros if self.is_zero_centered else torch.ones
        self.weight = nn.Parameter(initial(hidden_size, dtype=config.params_dtype))
        # Megatron marks parameters by attributes that torch does not declare.
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` [..., hidden_size]. The result has the weight's dtype; `x` may be wider."""
        wide_x = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide_x * torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + self.eps)
        if self.is_zero_centered:
            return (normed * (1.0 + self.weight.to(wide_x.dtype))).to(self.weight.dtype)
        return normed.to(self.weight.dtype) * self.weight
