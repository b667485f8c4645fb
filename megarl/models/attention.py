"""Causal attention over packed sequences, for Megatron's local spec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn


@dataclass
class PackedRow(PackedSeqParams):
    """Where the sequences of one packed row lie, and what every layer's attention needs of that.

    `positions` [tokens] counts from 0 in each sequence; `padded_index` [tokens] is each token's place in a
    [sequences, longest] block.
    """

    positions: Tensor | None = None
    padded_index: Tensor | None = None

    @classmethod
    def from_lengths(cls, lengths: list[int], device: torch.device, qkv_format: str) -> PackedRow:
        """The row that holds sequences of these lengths one after the other."""
        sizes = torch.tensor(lengths, dtype=torch.int64)
        ends = sizes.cumsum(0)
        total, longest = int(ends[-1]), int(sizes.max())
        row = torch.repeat_interleave(torch.arange(len(lengths)), sizes)
        positions = torch.arange(total) - (ends - sizes)[row]
        cu_seqlens = F.pad(ends, (1, 0)).to(device=device, dtype=torch.int32)
        return cls(
            qkv_format=qkv_format,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=cu_seqlens,
            cu_seqlens_kv_padded=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            positions=positions.to(device),
            padded_index=(row * longest + positions).to(device),
        )


class PackedAttention(nn.Module):
    """Core attention of the local spec: torch's variable-length flash kernel on CUDA, padded SDPA elsewhere.

    Megatron's own local kernel takes neither packed rows nor grouped heads without expanding them.
    """

    def __init__(self, *, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5  # type: ignore[operator]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedRow,
        **_: Any,
    ) -> Tensor:
        """Attend within each sequence.

        Shapes: query [tokens, 1, heads, head_dim], key and value [tokens, 1, groups, head_dim]; returns
        [tokens, 1, heads * head_dim].
        """
        row = packed_seq_params
        q, k, v = (x.squeeze(1) for x in (query, key, value))
        out = self._varlen(q, k, v, row) if q.is_cuda else self._padded(q, k, v, row)
        return out.reshape(out.size(0), 1, -1)

    def _varlen(self, q: Tensor, k: Tensor, v: Tensor, row: PackedRow) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        cu_seqlens, longest = row.cu_seqlens_q, row.max_seqlen_q
        return varlen_attn(  # type: ignore[return-value]
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            longest,
            longest,
            scale=self.scale,
            window_size=(-1, 0),
            enable_gqa=q.size(1) != k.size(1),
        )

    def _padded(self, q: Tensor, k: Tensor, v: Tensor, row: PackedRow) -> Tensor:
        sequences, longest = row.cu_seqlens_q.numel() - 1, row.max_seqlen_q
        # Padding follows the tokens of its sequence, so the causal mask alone hides it.
        q, k, v = (_to_padded(x, row.padded_index, sequences, longest) for x in (q, k, v))  # type: ignore[arg-type]
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
        )
        return out.transpose(1, 2).flatten(0, 1)[row.padded_index]


def _to_padded(x: Tensor, index: Tensor, sequences: int, longest: int) -> Tensor:
    """[tokens, heads, head_dim] -> [sequences, heads, longest, head_dim], zeros where no token is."""
    block = x.new_zeros(sequences * longest, *x.shape[1:]).index_copy(0, index, x)
    return block.view(sequences, longest, *x.shape[1:]).transpose(1, 2)
