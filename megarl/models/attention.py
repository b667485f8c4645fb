"""Causal attention over packed sequences, for models without Transformer Engine's layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from numpy.typing import NDArray
from torch import Tensor, nn

from megarl.data.token_batch import ranges
from megarl.models import sinks

_VARLEN_DTYPES = (torch.float16, torch.bfloat16)
"""Dtypes of torch's variable-length flash kernel."""


@dataclass(frozen=True)
class AttentionPart:
    """Part of a row that one attention kernel computes: queries of this rank and their keys, sequence by sequence.

    A row has one part, with context parallelism two: a rank's first and second chunk of each sequence. A sequence's
    last query and last key are the same token.

    `queries` [num_queries] indexes this rank's tokens; `keys` [num_keys] indexes all context-parallel ranks' tokens,
    rank after rank. None: all, in order. `num_queries` and `num_keys` [sequences] are lengths, on the host.
    `cu_queries` and `cu_keys` [sequences + 1] are their cumulative sums, on the device.
    """

    queries: Tensor | None
    keys: Tensor | None
    num_queries: np.ndarray
    num_keys: np.ndarray
    cu_queries: Tensor
    cu_keys: Tensor
    longest_query: int
    longest_key: int

    @cached_property
    def padded_queries(self) -> Tensor:
        """Index of each query in a flattened array [sequences, longest_query]: [num_queries]."""
        return self._list_padded_indices(self.num_queries, self.longest_query)

    @cached_property
    def padded_keys(self) -> Tensor:
        """Index of each key in a flattened array [sequences, longest_key]: [num_keys]."""
        return self._list_padded_indices(self.num_keys, self.longest_key)

    def is_plain(self, window: int) -> bool:
        """Return whether queries and keys are the same tokens, and no window excludes a key."""
        return self.keys is None and not self._excludes_keys(window)

    def mask(self, window: int) -> Tensor:
        """Return the mask of attended keys, bool [sequences or 1, 1, longest_query, longest_key].

        A query attends to the last `window` keys up to its own token; 0: to all of them.
        """
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    @cached_property
    def _masks(self) -> dict[int, Tensor]:
        return {}

    def _excludes_keys(self, window: int) -> bool:
        return 0 < window < self.longest_key

    def _make_mask(self, window: int) -> Tensor:
        """Return which keys each query attends to: bool [sequences, 1, longest_query, longest_key]."""
        num_earlier_keys = (self.num_keys - self.num_queries)[:, None, None, None]
        own_key_indices = np.arange(self.longest_query)[:, None] + num_earlier_keys
        key_indices = np.arange(self.longest_key)
        # Every query, even padding, attends to the key of its own token: a softmax over no keys would be NaN.
        is_attended = key_indices <= own_key_indices
        if self._excludes_keys(window):
            is_attended &= key_indices > own_key_indices - window
        return torch.tensor(is_attended, device=self.cu_queries.device)

    def _list_padded_indices(self, sizes: np.ndarray, longest: int) -> Tensor:
        is_token = np.arange(longest) < sizes[:, None]
        return torch.tensor(np.flatnonzero(is_token), device=self.cu_queries.device)


@dataclass
class PackedRow(PackedSeqParams):
    """A packed row: sequences end to end (Megatron's THD format), with the indices that every attention layer needs.

    With context parallelism each sequence is split into 2 * cp chunks. Rank r has chunks r and 2 * cp - 1 - r (zigzag),
    so causal attention costs all ranks the same. Fields:

    - `local` [tokens]: the row's indices of this rank's tokens (`host_local`: in host memory).
    - `positions` [tokens]: position of each token in its sequence.
    - `output_order` [tokens]: index that sorts the outputs of `parts` by token.
    - `gathered_index` [tokens of all ranks]: index of the row's tokens in the ranks' tokens, gathered rank after rank,
      each rank padded to `longest_part`.
    """

    positions: Tensor | None = None
    local: Tensor | None = None
    host_local: NDArray[np.int64] | None = None
    output_order: Tensor | None = None
    gathered_index: Tensor | None = None
    longest_part: int = 0
    parts: tuple[AttentionPart, ...] = ()

    @classmethod
    def from_lengths(
        cls, lengths: list[int], device: torch.device, qkv_format: str, *, cp: int = 1, cp_rank: int = 0
    ) -> PackedRow:
        """Make a row of sequences with these lengths in tokens. If cp > 1, lengths are multiples of 2 * cp."""
        # Indices are computed on the host: on a GPU, Python would wait for each length that it reads.
        sequence_lengths = np.asarray(lengths, dtype=np.int64)
        sequence_starts, longest_sequence = sequence_lengths.cumsum() - sequence_lengths, int(sequence_lengths.max())
        cu_seqlens = _cumulative_sums(sequence_lengths, device)
        if cp == 1:
            local_indices = np.arange(sequence_lengths.sum())
            parts: tuple[AttentionPart, ...] = (_make_part(None, None, sequence_lengths, sequence_lengths, device),)
            output_order = gathered_index = None
        else:
            split = _split_zigzag(sequence_lengths, cp, cp_rank, device)
            local_indices, parts = split.local_indices, split.parts
            output_order = torch.tensor(split.output_order, device=device)
            gathered_index = torch.tensor(split.gathered_index, device=device)
        sequence_of_token = np.repeat(np.arange(len(lengths)), sequence_lengths)
        # Padded and unpadded lengths are equal here. Given both, Transformer Engine 2.11 compares them on the GPU and
        # waits for the answer in every layer. Its context parallelism requires the padded lengths. Version 2.20 sees
        # that both are one tensor, so `pad_between_seqs` of Megatron-Core 0.19 is not needed.
        padded_cu_seqlens = cu_seqlens if cp > 1 else None
        return cls(
            qkv_format=qkv_format,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=padded_cu_seqlens,  # pyright: ignore[reportArgumentType]  (Megatron's default is None, too)
            cu_seqlens_kv_padded=padded_cu_seqlens,  # pyright: ignore[reportArgumentType]
            max_seqlen_q=longest_sequence,
            max_seqlen_kv=longest_sequence,
            positions=torch.tensor(local_indices - sequence_starts[sequence_of_token[local_indices]], device=device),
            local=torch.tensor(local_indices, device=device),
            host_local=local_indices,
            output_order=output_order,
            gathered_index=gathered_index,
            longest_part=len(local_indices),
            parts=parts,
        )

    def prediction_states(self, hidden: Tensor) -> Tensor:
        """Return the states [predictions, hidden_size] that the head reads, from `hidden` [tokens, hidden_size]."""
        return hidden

    def spread_predictions(self, outputs: Tensor) -> Tensor:
        """Copy the head's outputs [kinds, predictions] to every token of the sequences: [kinds, tokens]."""
        return outputs

    def spread_states(self, values: Tensor) -> Tensor:
        """Copy values [kinds, computed tokens] to every token of the sequences: [kinds, tokens]."""
        return values

    def states_at(self, hidden: Tensor, indices: Tensor) -> Tensor:
        """Return the hidden states [indices, hidden_size] at these indices of the rank's tokens."""
        return hidden[indices]


class _ZigzagSplit(NamedTuple):
    """A context-parallel rank's chunks of a row, in host memory. `PackedRow` describes the fields."""

    local_indices: NDArray[np.int64]
    gathered_index: NDArray[np.int64]
    parts: tuple[AttentionPart, ...]
    output_order: NDArray[np.int64]


def _split_zigzag(sequence_lengths: np.ndarray, cp: int, cp_rank: int, device: torch.device) -> _ZigzagSplit:
    """Split a row over `cp` ranks. Each sequence has 2 * cp chunks; rank r gets chunks r and 2 * cp - 1 - r."""
    sequence_starts, chunk_lengths = sequence_lengths.cumsum() - sequence_lengths, sequence_lengths // (2 * cp)
    tokens_by_rank = [_list_zigzag_indices(sequence_starts, chunk_lengths, cp, rank) for rank in range(cp)]
    # A row token's index among the tokens of all ranks, gathered rank after rank.
    gathered_index = np.argsort(np.concatenate(tokens_by_rank))
    chunk_numbers = (cp_rank, 2 * cp - 1 - cp_rank)
    # This rank's tokens of a sequence are its two chunks, one after the other.
    query_indices = [ranges((sequence_starts // cp) + chunk_lengths * is_second, chunk_lengths) for is_second in (0, 1)]
    # A chunk attends to itself and to all chunks before it.
    key_lengths = [chunk_lengths * (chunk_number + 1) for chunk_number in chunk_numbers]
    key_indices = [gathered_index[ranges(sequence_starts, lengths)] for lengths in key_lengths]
    parts = tuple(
        _make_part(queries, keys, chunk_lengths, lengths, device)
        for queries, keys, lengths in zip(query_indices, key_indices, key_lengths, strict=True)
    )
    return _ZigzagSplit(tokens_by_rank[cp_rank], gathered_index, parts, np.argsort(np.concatenate(query_indices)))


def _list_zigzag_indices(starts: np.ndarray, chunk_lengths: np.ndarray, cp: int, rank: int) -> np.ndarray:
    """Return where in the row one rank's tokens lie, in zigzag order: indices [tokens].

    `starts` and `chunk_lengths` [sequences]: start of each sequence, and length of its chunks.
    """
    chunk_starts = np.stack([starts + chunk_lengths * rank, starts + chunk_lengths * (2 * cp - 1 - rank)], axis=1)
    return ranges(chunk_starts.flatten(), chunk_lengths.repeat(2))


def _cumulative_sums(sizes: np.ndarray, device: torch.device) -> Tensor:
    return torch.tensor([0, *sizes.cumsum().tolist()], dtype=torch.int32, device=device)


def _make_part(
    queries: np.ndarray | None, keys: np.ndarray | None, num_q: np.ndarray, num_k: np.ndarray, device: torch.device
) -> AttentionPart:
    """Return the part with `num_q` queries and `num_k` keys of each sequence. `queries`, `keys` None: all tokens."""
    return AttentionPart(
        queries=None if queries is None else torch.tensor(queries, device=device),
        keys=None if keys is None else torch.tensor(keys, device=device),
        num_queries=num_q,
        num_keys=num_k,
        cu_queries=_cumulative_sums(num_q, device),
        cu_keys=_cumulative_sums(num_k, device),
        longest_query=int(num_q.max()),
        longest_key=int(num_k.max()),
    )


class PackedAttention(nn.Module):
    """Core attention for packed rows and context parallelism: for Megatron's local layers, and for all models with
    sinks.

    On CUDA, float16 and bfloat16 use torch's variable-length flash kernel. All else uses SDPA on padded sequences.
    Megatron-Core 0.16.1's local attention supports neither packed rows nor context parallelism. Keys and values are
    all-gathered over the context-parallel ranks, and their gradients are reduce-scattered.
    """

    def __init__(
        self,
        *,
        config: TransformerConfig,
        layer_number: int = 1,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.window = attended_keys(config, layer_number)
        """Number of keys that a query attends to, up to its own token; 0: all of them."""
        self.scale = score_factor(config, softmax_scale)
        self.cp_group = getattr(pg_collection, "cp", None)
        self.tp_group = getattr(pg_collection, "tp", None)
        # Named like the sinks of Megatron's and Transformer Engine's own attention.
        self.softmax_offset = self._make_sinks(config) if config.softmax_type == "learnable" else None
        """Score of each head's sink, [heads of this rank]. A sink takes part in the softmax and has no value vector."""

    def _make_sinks(self, config: TransformerConfig) -> nn.Parameter:
        """Return the sinks of this rank's heads, a parameter split over the tensor-parallel ranks."""
        num_heads = config.num_attention_heads // config.tensor_model_parallel_size
        offset = nn.Parameter(torch.empty(num_heads, dtype=config.params_dtype))
        if config.perform_initialization:
            assert config.init_method is not None
            config.init_method(offset)
        # Otherwise Megatron's gradient norm would count only the first tensor-parallel rank's sinks.
        set_tensor_model_parallel_attributes(offset, is_parallel=True, dim=0, stride=1)
        return offset

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Return the sinks as a checkpoint's state, split over the tensor-parallel ranks."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )

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

        Shapes: query [tokens, 1, heads, head_dim], key [tokens, 1, groups, head_dim], value [tokens, 1, groups, v];
        returns [tokens, 1, heads * v]. Megatron's latent attention passes inputs without the second dimension.
        """
        row = packed_seq_params
        q, k, v = (x.flatten(0, -3) for x in (query, key, value))
        if len(row.parts) > 1:
            k, v = gather_keys(k, v, self.cp_group)
        part_outputs = [self.attend(q, k, v, part) for part in row.parts]
        out = part_outputs[0] if row.output_order is None else torch.cat(part_outputs).index_select(0, row.output_order)
        return out.reshape(out.size(0), 1, -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, part: AttentionPart) -> Tensor:
        """Return the attention of one part of a row: [part's queries, heads, v].

        `q` [tokens, heads, head_dim] has this rank's tokens; `k` [tokens, groups, head_dim] and `v` [tokens, groups, v]
        have all context-parallel ranks' tokens.
        """
        has_varlen = q.is_cuda and q.dtype in _VARLEN_DTYPES
        if self.softmax_offset is not None:
            kernel = self._attend_varlen_with_sinks if has_varlen else self._attend_padded_with_sinks
        else:
            kernel = self._attend_varlen if has_varlen else self._attend_padded
        return kernel(_select_tokens(q, part.queries), _select_tokens(k, part.keys), _select_tokens(v, part.keys), part)

    def _attend_varlen(self, q: Tensor, k: Tensor, v: Tensor, part: AttentionPart) -> Tensor:
        """Attend with torch's kernel for packed sequences, which needs no padding."""
        from torch.nn.attention.varlen import varlen_attn

        grouped_arguments: dict[str, Any] = {}
        value_dim = v.size(-1)
        # The kernel takes one size for all heads. Padded values give outputs of zero, cut off below.
        v = F.pad(v, (0, k.size(-1) - value_dim))
        if q.size(1) != k.size(1):
            if _takes_grouped_heads(varlen_attn):
                grouped_arguments = {"enable_gqa": True}
            else:
                k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))
        out = varlen_attn(
            q,
            k,
            v,
            part.cu_queries,
            part.cu_keys,
            part.longest_query,
            part.longest_key,
            scale=self.scale,
            window_size=(self.window - 1, 0),
            **grouped_arguments,
        )
        assert isinstance(out, Tensor)
        return out.narrow(-1, 0, value_dim)

    def _attend_padded(self, q: Tensor, k: Tensor, v: Tensor, part: AttentionPart) -> Tensor:
        """Attend with each sequence padded to the longest one, then remove the padding."""
        mask = None if part.is_plain(self.window) else part.mask(self.window)
        # Padding follows the tokens of its sequence, so the causal mask alone excludes it.
        q, k, v = _pad_all(q, k, v, part)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
        )
        return _from_padded(out, part)

    def _attend_varlen_with_sinks(self, q: Tensor, k: Tensor, v: Tensor, part: AttentionPart) -> Tensor:
        assert self.softmax_offset is not None
        lengths = part.cu_queries, part.cu_keys, part.longest_query, part.longest_key
        return sinks.attend(q, k, v, self.softmax_offset, sinks.FlashKernel(lengths, self.scale, self.window))

    def _attend_padded_with_sinks(self, q: Tensor, k: Tensor, v: Tensor, part: AttentionPart) -> Tensor:
        """Compute `attend` with sinks; the softmax is float32 or wider.

        All scores exist at once: [sequences, heads, longest_query, longest_key].
        """
        assert self.softmax_offset is not None
        k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))
        q, k, v = _pad_all(q, k, v, part)
        scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * self.scale
        scores = torch.where(part.mask(self.window), scores, -torch.inf)
        sink_scores = self.softmax_offset.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        probabilities = torch.cat([scores, sink_scores], dim=-1).softmax(-1).narrow(-1, 0, scores.size(-1))
        return _from_padded(probabilities.to(v.dtype) @ v, part)


def gather_keys(k: Tensor, v: Tensor, cp_group: Any) -> tuple[Tensor, Tensor]:
    """Gather keys and values over the context-parallel ranks: [tokens of all ranks, groups, ...], rank after rank."""
    # The backward pass of Megatron's sequence-parallel gather is a reduce-scatter, as needed for the context-parallel
    # group.
    keys_and_values = gather_from_sequence_parallel_region(torch.cat([k, v], dim=-1), group=cp_group)
    k, v = keys_and_values.split([k.size(-1), v.size(-1)], dim=-1)
    return k, v


def attended_keys(config: TransformerConfig, layer_number: int) -> int:
    """Return the number of keys that a layer's queries attend to, up to their own token; 0: all of them."""
    window_size, window_layers = config.window_size, config.window_attn_skip_freq
    # Without a list of layers every layer has the window. Megatron's function also accepts None (0.16.1).
    has_window = is_layer_window_attention(window_size, window_layers, layer_number)  # pyright: ignore[reportArgumentType]
    # Megatron's window leaves out the query's own token.
    return window_size[0] + 1 if has_window and window_size else 0


def score_factor(config: TransformerConfig, softmax_scale: float | None) -> float:
    channels: Any = config.kv_channels
    return channels**-0.5 if softmax_scale is None else softmax_scale


def _select_tokens(x: Tensor, indices: Tensor | None) -> Tensor:
    return x if indices is None else x.index_select(0, indices)


@cache
def _takes_grouped_heads(kernel: Callable[..., Any]) -> bool:
    """Return whether a kernel supports grouped-query attention; torch 2.11's varlen_attn does not."""
    return "enable_gqa" in inspect.signature(kernel).parameters


def _pad_all(q: Tensor, k: Tensor, v: Tensor, part: AttentionPart) -> tuple[Tensor, Tensor, Tensor]:
    q = _to_padded(q, part.padded_queries, len(part.num_queries), part.longest_query)
    k, v = (_to_padded(x, part.padded_keys, len(part.num_keys), part.longest_key) for x in (k, v))
    return q, k, v


def _from_padded(out: Tensor, part: AttentionPart) -> Tensor:
    """Return [sequences, heads, longest_query, head_dim] without padding: [queries, heads, head_dim]."""
    return out.transpose(1, 2).flatten(0, 1).index_select(0, part.padded_queries)


def _to_padded(x: Tensor, padded_indices: Tensor, sequences: int, longest: int) -> Tensor:
    """Reshape [tokens, heads, head_dim] to [sequences, heads, longest, head_dim], padded with zeros.

    `padded_indices` [tokens]: where each token goes in the flattened result.
    """
    padded = x.new_zeros(sequences * longest, *x.shape[1:]).index_copy(0, padded_indices, x)
    return padded.view(sequences, longest, *x.shape[1:]).transpose(1, 2)
