"""Causal attention over packed sequences, for Megatron's local spec."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn


@dataclass(frozen=True)
class Part:
    """Queries of this rank and the keys that they may see, sequence by sequence, aligned at their ends.

    `queries` [num_queries] and `keys` [num_keys] are places among the rank's own tokens and among all context-parallel
    ranks' tokens one rank after the other; None means all of them, in order.
    """

    queries: Tensor | None
    keys: Tensor | None
    num_queries: Tensor
    num_keys: Tensor
    cu_queries: Tensor
    cu_keys: Tensor
    longest_query: int
    longest_key: int

    @cached_property
    def padded_queries(self) -> Tensor:
        """Each query's place in a [sequences, longest_query] block."""
        return _padded_places(self.num_queries, self.longest_query)

    @cached_property
    def padded_keys(self) -> Tensor:
        """Each key's place in a [sequences, longest_key] block."""
        return _padded_places(self.num_keys, self.longest_key)

    @cached_property
    def mask(self) -> Tensor | None:
        """Which keys a query sees [sequences, 1, longest_query, longest_key]; None where plain causality says it."""
        if self.keys is None:
            return None
        seen = self.num_keys - self.num_queries
        allowed = torch.arange(self.longest_query)[None, :, None] + seen[:, None, None]
        return (torch.arange(self.longest_key)[None, None] <= allowed)[:, None]


@dataclass
class PackedRow(PackedSeqParams):
    """Where the sequences of one packed row lie, and what every layer's attention needs of that.

    With context parallelism each sequence is cut into 2 * cp chunks, and a rank holds the chunk of its own number from
    the front and the one from the back: so causal attention costs all ranks the same. `local` [tokens] are the rank's
    places in the row, `positions` [tokens] their positions in their sequences, `parts` their attention; `order`
    [tokens] sorts the parts' queries.
    """

    positions: Tensor | None = None
    local: Tensor | None = None
    order: Tensor | None = None
    parts: tuple[Part, ...] = ()

    @classmethod
    def from_lengths(
        cls, lengths: list[int], device: torch.device, qkv_format: str, *, cp: int = 1, cp_rank: int = 0
    ) -> PackedRow:
        """The row that holds sequences of these lengths (multiples of 2 * cp where cp > 1) one after the other."""
        sizes = torch.tensor(lengths, dtype=torch.int64)
        ends = sizes.cumsum(0)
        cu_seqlens = _from_zero(sizes, device)
        starts, longest = ends - sizes, int(sizes.max())
        if cp == 1:
            local = _ranges(starts, sizes)
            parts: tuple[Part, ...] = (_part(None, None, sizes, sizes, device),)
            order = None
        else:
            chunk = sizes // (2 * cp)
            of_rank = [_zigzag(starts, chunk, cp, rank) for rank in range(cp)]
            local, place = of_rank[cp_rank], torch.argsort(torch.cat(of_rank))
            halves = (cp_rank, 2 * cp - 1 - cp_rank)
            queries = [_ranges((starts // cp) + chunk * back, chunk) for back in (0, 1)]
            keys = [place[_ranges(starts, chunk * (half + 1))] for half in halves]
            parts = tuple(
                _part(q, k, chunk, chunk * (half + 1), device) for q, k, half in zip(queries, keys, halves, strict=True)
            )
            order = torch.argsort(torch.cat(queries)).to(device)
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), sizes)
        return cls(
            qkv_format=qkv_format,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=cu_seqlens,
            cu_seqlens_kv_padded=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            positions=(local - starts[sequence[local]]).to(device),
            local=local.to(device),
            order=order,
            parts=parts,
        )


def _zigzag(starts: Tensor, chunk: Tensor, cp: int, rank: int) -> Tensor:
    """The places in the row of one rank's tokens: of every sequence a chunk from the front and one from the back."""
    firsts = torch.stack([starts + chunk * rank, starts + chunk * (2 * cp - 1 - rank)], dim=1)
    return _ranges(firsts.flatten(), chunk.repeat_interleave(2))


def _ranges(starts: Tensor, sizes: Tensor) -> Tensor:
    """[start, start + size) of each, one after the other."""
    before = sizes.cumsum(0) - sizes
    return torch.arange(int(sizes.sum())) + (starts - before).repeat_interleave(sizes)


def _from_zero(sizes: Tensor, device: torch.device) -> Tensor:
    return F.pad(sizes.cumsum(0), (1, 0)).to(device=device, dtype=torch.int32)


def _part(queries: Tensor | None, keys: Tensor | None, num_q: Tensor, num_k: Tensor, device: torch.device) -> Part:
    return Part(
        queries=None if queries is None else queries.to(device),
        keys=None if keys is None else keys.to(device),
        num_queries=num_q.to(device),
        num_keys=num_k.to(device),
        cu_queries=_from_zero(num_q, device),
        cu_keys=_from_zero(num_k, device),
        longest_query=int(num_q.max()),
        longest_key=int(num_k.max()),
    )


class PackedAttention(nn.Module):
    """Core attention of the local spec: torch's variable-length flash kernel on CUDA, padded SDPA elsewhere.

    Megatron's own local kernel takes neither packed rows nor grouped heads without expanding them, nor context
    parallelism: here keys and values of all ranks are gathered, their gradients summed back.
    """

    def __init__(
        self, *, config: TransformerConfig, softmax_scale: float | None = None, pg_collection: Any = None, **_: Any
    ) -> None:
        super().__init__()
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5  # type: ignore[operator]
        self.cp_group = getattr(pg_collection, "cp", None)

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
        if len(row.parts) > 1:
            k, v = gather_from_sequence_parallel_region(torch.cat([k, v], dim=1), group=self.cp_group).chunk(2, dim=1)
        attend = self._varlen if q.is_cuda else self._padded
        outs = [attend(_taken(q, part.queries), _taken(k, part.keys), _taken(v, part.keys), part) for part in row.parts]
        out = outs[0] if row.order is None else torch.cat(outs)[row.order]
        return out.reshape(out.size(0), 1, -1)

    def _varlen(self, q: Tensor, k: Tensor, v: Tensor, part: Part) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(  # type: ignore[return-value]
            q,
            k,
            v,
            part.cu_queries,
            part.cu_keys,
            part.longest_query,
            part.longest_key,
            scale=self.scale,
            window_size=(-1, 0),
            enable_gqa=q.size(1) != k.size(1),
        )

    def _padded(self, q: Tensor, k: Tensor, v: Tensor, part: Part) -> Tensor:
        place, keys, mask = part.padded_queries, part.padded_keys, part.mask
        # Padding follows the tokens of its sequence, so the causal mask alone hides it.
        q = _to_padded(q, place, len(part.num_queries), part.longest_query)
        k, v = (_to_padded(x, keys, len(part.num_keys), part.longest_key) for x in (k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
        )
        return out.transpose(1, 2).flatten(0, 1)[place]


def _taken(x: Tensor, places: Tensor | None) -> Tensor:
    return x if places is None else x[places]


def _padded_places(sizes: Tensor, longest: int) -> Tensor:
    """Each token's place in a [sequences, longest] block."""
    return _ranges(torch.arange(len(sizes)) * longest, sizes)


def _to_padded(x: Tensor, index: Tensor, sequences: int, longest: int) -> Tensor:
    """[tokens, heads, head_dim] -> [sequences, heads, longest, head_dim], zeros where no token is."""
    block = x.new_zeros(sequences * longest, *x.shape[1:]).index_copy(0, index, x)
    return block.view(sequences, longest, *x.shape[1:]).transpose(1, 2)
