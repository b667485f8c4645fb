"""Applies YaRN's attention factor (arXiv:2309.00071, section 3.4) for models that rotate only some channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megarl.families.parts import Latent
from megarl.families.shape import ModelShape


def scales_rotated_channels(shape: ModelShape) -> bool:
    """Return whether an attention factor applies to only some channels of a head."""
    is_latent = isinstance(shape.attention, Latent)
    return shape.rotary.attention_factor != 1.0 and not is_latent and shape.rotary_channels < shape.head_dim


def scale_rotated_queries(attention: type[nn.Module], shape: ModelShape) -> type[nn.Module]:
    """Return a core attention that multiplies the rotated channels of queries by the squared attention factor.

    transformers and vLLM multiply queries and keys by the factor once each. The scores are equal.
    """
    channels, factor = shape.rotary_channels, shape.rotary.attention_factor**2

    # `policy.evaluation_mode` finds core attention by this ending of its name.
    class ScaledDotProductAttention(attention):
        def forward(self, query: Tensor, *arguments: Any, **named: Any) -> Tensor:
            """Scale the rotated channels of `query` [tokens, ..., heads, head_dim], the first ones, then attend."""
            rotated, unrotated = query.split([channels, query.size(-1) - channels], dim=-1)
            return super().forward(torch.cat([rotated * factor, unrotated], dim=-1), *arguments, **named)

    return ScaledDotProductAttention
