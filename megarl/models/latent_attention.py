"""Multi-head latent attention (arXiv:2405.04434, section 2.1) over packed rows, with Megatron's module.

Megatron-Core 0.16.1 computes rotary angles inside this attention, from a token's index in the row. `RowRotary` uses the
position in the sequence instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer import multi_latent_attention
from torch import Tensor, nn

from megarl.models.attention import PackedRow
from megarl.platform import transformer_engine

# Megatron-Core 0.16.1 counts Transformer Engine as present even if it is missing. Attention then fails in `isinstance`
# with a stand-in for TELinear.
multi_latent_attention.HAVE_TE = transformer_engine.is_installed()
# Megatron-Core 0.19 imports this name with Transformer Engine only. Its attention refuses down projections of an
# unknown class.
multi_latent_attention.Linear = Linear


class LatentAttention(multi_latent_attention.MLASelfAttention):
    """Megatron's latent attention, built from the norms and projections of its spec."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Return the classes of the spec, as Megatron-Core 0.16.1 does without this method.

        Megatron-Core 0.19 changes them if queries have no low rank (Moonlight, GLM-4.7-Flash). It refuses all local
        layers, and adds a norm before the query projection of Transformer Engine's layers.
        """
        parts = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in parts}


class RowRotary(nn.Module):
    """Computes the rotary angles of a packed row. Replaces Megatron's `YarnRotaryEmbedding`. Layers may share it.

    `frequencies` is float32 [channels / 2], in radians per position. `scale`: factor of cosines and sines (YaRN's
    attention factor).
    """

    def __init__(self, frequencies: Tensor, scale: float = 1.0) -> None:
        super().__init__()
        # A plain attribute, because a buffer would be converted to the model's dtype. Angles need float32.
        self.frequencies = frequencies
        self.scale = scale
        self._row: PackedRow | None = None
        self._tables: tuple[Tensor, Tensor] | None = None

    def get_rotary_seq_len(
        self, inference_context: Any, transformer: Any, hidden: Any, config: Any, row: PackedRow
    ) -> int:
        """Store the `row` of the forward pass. Return the length of its longest sequence in tokens.

        All other arguments have no effect.
        """
        self._row = row
        assert row.max_seqlen_q is not None
        return int(row.max_seqlen_q)

    def forward(self, length: int, packed_seq: bool = False) -> tuple[Tensor, float]:
        """Return the rotary angles in radians, and the factor of their cosines and sines (`scale`).

        With `packed_seq`, the format of rows in Transformer Engine, there is one angle per position of a sequence:
        float32 [length, 1, 1, channels]. Otherwise there is one per token of the current row: float32 [tokens, 1,
        channels].
        """
        if packed_seq:
            return self._angles_by_position(length), self.scale
        # `get_rotary_seq_len` stored the row.
        assert self._row is not None and self._row.positions is not None
        return self._angles(self._row.positions)[:, None], self.scale

    def get_cached_cos_sin(self, length: int, dtype: torch.dtype, packed_seq: bool) -> tuple[Tensor, Tensor]:
        """Return scaled cosines and sines for Megatron's fused kernel, each [length, 1, 1, channels] of `dtype`."""
        if self._tables is None or len(self._tables[0]) < length or self._tables[0].dtype != dtype:
            angles = self._angles_by_position(length)
            self._tables = (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)
        cosines, sines = self._tables
        return cosines[:length], sines[:length]

    def _angles_by_position(self, length: int) -> Tensor:
        return self._angles(torch.arange(length, device=self.frequencies.device))[:, None, None]

    def _angles(self, positions: Tensor) -> Tensor:
        """Return the angle of each channel at positions [n]: float32 [n, channels]. Both halves are equal."""
        angles = torch.outer(positions.float(), self.frequencies)
        return torch.cat([angles, angles], dim=-1)


def use_local_modules(layer: Any, norm: type[nn.Module]) -> None:
    """Set norms and down projections in Megatron's local spec of a layer with latent attention.

    The down projections are replicated on all ranks, as in Transformer Engine's spec.
    """
    layer.submodules.self_attention.module = LatentAttention
    attention = layer.submodules.self_attention.submodules
    attention.q_layernorm = attention.kv_layernorm = norm
    # Megatron-Core 0.16.1 would split these projections over tensor-parallel ranks and gather their outputs. The
    # gradient of the rotary key, which all heads share, would lack the heads of other ranks. With two ranks the error
    # of the whole gradient was 20% of its norm.
    attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear


def use_transformer_engine_modules(layer: Any) -> None:
    """In Transformer Engine's spec of a layer with latent attention, set an attention that pads values."""
    layer.submodules.self_attention.module = LatentAttention
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = with_padded_values(attention.core_attention)


def share_rotary(layers: Iterable[Any], rotary: RowRotary) -> None:
    for layer in layers:
        # A plain attribute cannot replace a submodule of the same name, so `rotary` is a module.
        layer.self_attention.rotary_pos_emb = rotary


def with_padded_values(attention: type[nn.Module]) -> type[nn.Module]:
    """Return a core attention that pads values with zeros to the size of query and key heads, then cuts its output.

    Flash kernels for packed rows need equal sizes. For unequal sizes, Megatron-Core 0.16.1 has no kernel of Transformer
    Engine.
    """

    class PaddedDotProductAttention(attention):
        def __init__(self, *args: Any, k_channels: int, v_channels: int, **kwargs: Any) -> None:
            super().__init__(*args, k_channels=k_channels, v_channels=k_channels, **kwargs)
            self.value_channels = v_channels

        def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            """Attend. Shapes: query and key [tokens, heads, head_dim], value [tokens, heads, v]; returns [tokens, heads
            * v].
            """
            width = key.size(-1)
            padded = F.pad(value, (0, width - self.value_channels))
            out = super().forward(query, key, padded, *args, **kwargs)
            return out.unflatten(-1, (-1, width))[..., : self.value_channels].flatten(-2)

    return PaddedDotProductAttention
