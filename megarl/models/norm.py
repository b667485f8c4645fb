"""RMSNorm for Megatron's local spec, with sequence parallelism."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """y = x / rms(x) * weight over the last dimension (arXiv:1910.07467, eq. 4), computed in float32.

    Under sequence parallelism each tensor-parallel rank normalises its own tokens. The weight's attribute
    `sequence_parallel` makes Megatron sum its gradient over these ranks. Megatron-Core 0.16.1's own norm for the local
    spec supports no sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron marks parameters by attributes that torch does not declare.
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight
