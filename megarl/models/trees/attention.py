"""Attention over a tree of prefixes: each token attends to itself and to all tokens before it in its sequences.

A segment is a run of tokens shared by the same sequences. In depth-first order, token q attends to token k if k <= q <
reach[k]; `reach` is the end of the subtree below k's segment. On a CPU, flash kernels compute each segment's attention
to itself (causal) and its subtree's attention to the segment (full). The parts are merged by their sums of
exponentials, as in Ring Attention (arXiv:2310.01889, section 3). On a GPU, FlexAttention reads a mask of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from megarl.data.token_batch import ranges

_MASK_BLOCK = 128
"""Tokens of a block of FlexAttention's mask: its default, for which its kernels are tuned."""
_WASTED_SHARE = 0.25
"""Parts of unequal sizes share a call if padding adds at most this share of scores."""
_CALL_SCORES = 4096
"""Padding scores that take as much time as one more call: 64 queries and keys of a few heads."""


@dataclass(frozen=True)
class TokenTree:
    """The stored tokens of a row, and the map from the model's outputs to the row's sequences.

    Shapes: `reach` [stored tokens], with padding. `starts`, `ends` and `reaches` [segments], on the host: a segment's
    first token, its end, and the end of its subtree. `positions` [stored tokens], on the host: positions in sequences.

    With context parallelism each segment is split into chunks, and a rank owns some of them. `own_tokens` [own tokens],
    on the host and ascending: this rank's stored tokens. `chunks` [own chunks, 3], on the host: the first token of the
    chunk's segment, the chunk's first token and its end. `gathered_index` [stored tokens]: index of each stored token
    in the ranks' tokens, rank after rank; None on a single rank.

    All further fields are this rank's. `num_represented` [own tokens], on the host: tokens of sequences that each one
    represents; 0 for padding. `stored_of` [tokens]: index, among the own tokens, of each token of the sequences on this
    rank (`host_stored_of`: in host memory). A log-prob is an edge of the tree, from a token to the next one.
    `edge_sources` [edges]: indices of the own tokens before each edge. `edges` [tokens]: the edge to the token after
    each token; any edge for the last token.
    """

    reach: Tensor
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    reaches: NDArray[np.int64]
    positions: NDArray[np.int64]
    own_tokens: NDArray[np.int64]
    chunks: NDArray[np.int64]
    gathered_index: Tensor | None
    num_represented: NDArray[np.int64]
    stored_of: Tensor
    host_stored_of: NDArray[np.int64]
    edge_sources: Tensor
    edges: Tensor

    @cached_property
    def parts(self) -> tuple[TreePart, ...]:
        """The calls of the attention kernel for one layer. Queries are this rank's tokens, keys are all stored tokens.

        Order: chunks of this rank, then earlier tokens of their segments, then ancestors from the root on.
        """
        device = self.reach.device
        segment_starts, chunk_starts, chunk_ends = self.chunks.T
        queries = self._count_own_before(chunk_starts), self._count_own_before(chunk_ends)
        calls = _group_blocks(*queries, chunk_starts, chunk_ends, is_causal=True, device=device)
        is_second_chunk = np.diff(segment_starts, prepend=-1) == 0
        # Both chunks of a segment attend to the same tokens. They use two calls, because the backward pass of a call
        # writes each key's gradient once.
        for is_chosen_chunk in (~is_second_chunk, is_second_chunk):
            borders = (
                x[is_chosen_chunk & (chunk_starts > segment_starts)] for x in (*queries, segment_starts, chunk_starts)
            )
            calls += _group_blocks(*borders, is_causal=False, device=device)
        num_ancestors = self._count_ancestors()
        queries = self._count_own_before(self.ends), self._count_own_before(self.reaches)
        has_queries = queries[1] > queries[0]
        # Subtrees of one level are disjoint: in one call, each query has at most one part to merge.
        for depth in range(int(num_ancestors.max(initial=0)) + 1):
            is_selected = has_queries & (num_ancestors == depth)
            borders = (x[is_selected] for x in (*queries, self.starts, self.ends))
            calls += _group_blocks(*borders, is_causal=False, device=device)
        return tuple(calls)

    def windowed_parts(self, window: int) -> tuple[TreePart, ...]:
        """Return a single part with a mask: in these layers, a query attends to the last `window` keys up to its own
        token.
        """
        if window not in self._window_calls:
            queries, keys = len(self.own_tokens), len(self.positions)
            all_tokens = slice(0, queries), slice(0, keys)
            mask = self.attended_mask(window)[None, None]
            self._window_calls[window] = (TreePart(*all_tokens, (1, queries), (1, keys), False, mask, True),)
        return self._window_calls[window]

    def attended_mask(self, window: int = 0) -> Tensor:
        """Return the mask of attended keys, bool [own tokens, stored tokens]. Window 0 has no limit."""
        tokens, own_tokens = torch.arange(len(self.reach), device=self.reach.device), self._own_on_device[:, None]
        mask = (tokens <= own_tokens) & (own_tokens < self.reach)
        if window:
            positions = self._positions_on_device
            mask &= positions[own_tokens] - positions < window
        return mask

    def block_mask(self, window: int = 0) -> BlockMask:
        """Return FlexAttention's mask: the blocks of keys for each block of queries."""
        if window not in self._block_masks:
            self._block_masks[window] = self._make_block_mask(window)
        return self._block_masks[window]

    def window_excludes_tokens(self, window: int) -> bool:
        """Return whether a window (0: none) excludes tokens."""
        return 0 < window <= int(self.positions.max(initial=0))

    @cached_property
    def _own_on_device(self) -> Tensor:
        return torch.from_numpy(self.own_tokens).to(self.reach.device)

    @cached_property
    def _positions_on_device(self) -> Tensor:
        return torch.from_numpy(self.positions).to(self.reach.device)

    def _count_own_before(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many of this rank's own tokens precede each of the stored tokens `tokens`: both [*shape]."""
        return np.searchsorted(self.own_tokens, tokens)

    @cached_property
    def _window_calls(self) -> dict[int, tuple[TreePart, ...]]:
        return {}

    @cached_property
    def _block_masks(self) -> dict[int, BlockMask]:
        return {}

    def _count_ancestors(self) -> NDArray[np.int64]:
        """Return the number of ancestors of each segment: [segments]. A subtree spans from `start` to `reach`."""
        levels = np.zeros(len(self.starts), np.int64)
        open_ends: list[int] = []
        for segment, (start, reach) in enumerate(zip(self.starts.tolist(), self.reaches.tolist(), strict=True)):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            levels[segment] = len(open_ends)
            open_ends.append(reach)
        return levels

    def _make_block_mask(self, window: int) -> BlockMask:
        """Sort pairs of a query block and a key block into not attended, partly attended and fully attended ones."""
        device, mask_shape = self.reach.device, (len(self.own_tokens), len(self.positions))
        reach_of_token = np.repeat(self.reaches, self.ends - self.starts)
        (query_firsts, query_lasts), (key_firsts, key_lasts) = (_list_block_borders(size) for size in mask_shape)
        farthest_reach, nearest_reach = (
            np.maximum.reduceat(reach_of_token, key_firsts),
            np.minimum.reduceat(reach_of_token, key_firsts),
        )
        query_blocks, key_blocks = np.ix_(np.arange(len(query_firsts)), np.arange(len(key_firsts)))
        first_query, last_query = (self.own_tokens[borders][query_blocks] for borders in (query_firsts, query_lasts))
        # True if some query may attend to some key of the block. The mask's function then decides for each pair.
        is_needed = (key_firsts[key_blocks] <= last_query) & (farthest_reach[key_blocks] > first_query)
        is_full = (key_lasts[key_blocks] <= first_query) & (nearest_reach[key_blocks] > last_query)
        # FlexAttention reads whole blocks, so the row's incomplete last block needs the function.
        is_full &= (key_lasts - key_firsts == _MASK_BLOCK - 1)[key_blocks] & (
            query_lasts - query_firsts == _MASK_BLOCK - 1
        )[query_blocks]
        if window:
            highest_position = np.maximum.reduceat(self.positions[self.own_tokens], query_firsts)
            lowest_position = np.minimum.reduceat(self.positions, key_firsts)
            is_full &= highest_position[query_blocks] - lowest_position[key_blocks] < window
        own_tokens, positions, reaches = self._own_on_device, self._positions_on_device, self.reach

        def is_attended(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            """Return whether a query attends to a key: bool [*any]. `query` and `key` are indices, [*any]."""
            token = own_tokens[query]
            mask = (key <= token) & (token < reaches[key])
            return mask & (positions[token] - positions[key] < window) if window else mask

        partial_lists, full_lists = (_list_blocks(blocks, device) for blocks in (is_needed & ~is_full, is_full))
        return BlockMask.from_kv_blocks(
            *partial_lists, *full_lists, BLOCK_SIZE=_MASK_BLOCK, mask_mod=is_attended, seq_lengths=mask_shape
        )


@dataclass(frozen=True, slots=True)
class TreePart:
    """One call of a kernel: some blocks of queries and the keys of each block, padded to the largest block.

    `queries` are own tokens, `keys` stored tokens. Both are a slice, or (indices in padded arrays, tokens). Shapes
    without heads: `query_shape` and `key_shape` (blocks, length); `mask` bool broadcast to [blocks, 1, queries, keys].
    """

    queries: slice | tuple[Tensor, Tensor]
    keys: slice | tuple[Tensor, Tensor]
    query_shape: tuple[int, int]
    key_shape: tuple[int, int]
    is_causal: bool
    mask: Tensor | None
    is_first: bool
    """Whether the part computes the first output of its queries. Later parts are merged into this output."""

    @property
    def query_tokens(self) -> slice | Tensor:
        return self.queries if isinstance(self.queries, slice) else self.queries[1]

    @property
    def key_tokens(self) -> slice | Tensor:
        return self.keys if isinstance(self.keys, slice) else self.keys[1]

    def padded_queries(self, x: Tensor) -> Tensor:
        """Return the queries' entries of `x` [own tokens, ...] as [blocks, heads, length, ...], padded by zeros."""
        return _pad_blocks(x, self.queries, self.query_shape)

    def padded_keys(self, x: Tensor) -> Tensor:
        """Return the keys' entries of `x` [stored tokens, ...] as [blocks, heads, length, ...], padded by zeros."""
        return _pad_blocks(x, self.keys, self.key_shape)

    def unpad_queries(self, padded: Tensor) -> Tensor:
        """Undo `padded_queries`: return [queries, heads, ...] from `padded` [blocks, heads, length, ...]."""
        return _unpad_blocks(padded, self.queries)

    def unpad_keys(self, padded: Tensor) -> Tensor:
        """Undo `padded_keys`: return [keys, heads, ...] from `padded` [blocks, heads, length, ...]."""
        return _unpad_blocks(padded, self.keys)

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """Return the mask as scores to add, 0 or minus infinity: [blocks, 1, queries or 1, keys]; None without
        a mask.
        """
        if self.mask is None:
            return None
        return torch.zeros(self.mask.shape, dtype=dtype).masked_fill_(~self.mask, -torch.inf)


def attend(
    q: Tensor, k: Tensor, v: Tensor, tree: TokenTree, *, scale: float, window: int, sinks: Tensor | None
) -> Tensor:
    """Return the attention of this rank's tokens of a tree: [own tokens, heads, v].

    Shapes: q [own tokens, heads, head_dim], k [stored tokens, groups, head_dim], v [stored tokens, groups, v], sinks
    [heads]. A query attends to the last `window` keys up to its own token; 0: to all.
    """
    width = v.size(-1)
    # The kernels take one size for all heads. Padded values give outputs of zero, cut off below.
    if width < k.size(-1):
        v = F.pad(v, (0, k.size(-1) - width))
    kernel = flex_attend if q.is_cuda else merged_attend
    out = kernel(q, k, v, tree, scale=scale, window=window if tree.window_excludes_tokens(window) else 0, sinks=sinks)
    return out.narrow(-1, 0, width)


def gather_entries(x: Tensor, index: Tensor, dim: int = 0) -> Tensor:
    """Return the entries of `x` [*shape] at `index` [n] along `dim`. The gradients of repeated entries are summed.

    The sum has a fixed order: equal inputs give equal bits.
    """
    # torch 2.13 adds the gradients of repeated entries in a fixed order in two cases only: for `index_select` on a CPU,
    # and for an index in brackets on CUDA.
    return x[(slice(None),) * dim + (index,)] if x.is_cuda else x.index_select(dim, index)


def merged_attend(
    q: Tensor, k: Tensor, v: Tensor, tree: TokenTree, *, scale: float, window: int, sinks: Tensor | None
) -> Tensor:
    """Compute `attend` [own tokens, heads, head_dim] by torch's flash kernel for CPUs, merged from parts."""
    parts = tree.windowed_parts(window) if window else tree.parts
    return _MergedAttention.apply(q, k, v, sinks, parts, scale)


def flex_attend(
    q: Tensor, k: Tensor, v: Tensor, tree: TokenTree, *, scale: float, window: int, sinks: Tensor | None
) -> Tensor:
    """Compute `attend` [own tokens, heads, head_dim] by FlexAttention, compiled on a GPU."""
    kernel: Any = _compiled_flex() if q.is_cuda else flex_attention
    inputs = (x.transpose(0, 1)[None] for x in (q, k, v))
    has_grouped_heads = q.size(1) != k.size(1)
    request_lse = AuxRequest(lse=True)
    out, aux = kernel(
        *inputs, block_mask=tree.block_mask(window), scale=scale, enable_gqa=has_grouped_heads, return_aux=request_lse
    )
    out = out[0].transpose(0, 1)
    if sinks is None:
        return out
    lse = aux.lse[0].T
    # A sink adds its exponential to each query's sum.
    return (out * (lse - torch.logaddexp(lse, sinks.to(lse.dtype))).exp()[..., None]).to(q.dtype)


@cache
def _compiled_flex() -> Any:
    # Rows differ in their number of tokens: static shapes would compile a kernel for each.
    return torch.compile(flex_attention, dynamic=True)


class _MergedAttention(torch.autograd.Function):
    """Attention merged from parts. A part's backward pass needs only the merged output and sum of exponentials."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, parts: Sequence[TreePart], scale: float
    ) -> Tensor:
        """Compute the parts one by one, and merge their outputs by `lse` [own tokens, heads], the log of each sum."""
        out = torch.empty_like(q, dtype=torch.promote_types(q.dtype, torch.float32))
        lse = out.new_empty(q.shape[:2])
        for part in parts:
            inputs = part.padded_queries(q), part.padded_keys(k), part.padded_keys(v)
            part_out, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *inputs, 0.0, part.is_causal, attn_mask=part.bias(q.dtype), scale=scale
            )
            part_out, part_lse, tokens = part.unpad_queries(part_out), part.unpad_queries(part_lse), part.query_tokens
            if part.is_first:
                out[tokens], lse[tokens] = part_out.to(out.dtype), part_lse
                continue
            lse_before = lse[tokens]
            merged_lse = torch.logaddexp(lse_before, part_lse)
            out[tokens] = (
                out[tokens] * (lse_before - merged_lse).exp()[..., None]
                + part_out * (part_lse - merged_lse).exp()[..., None]
            )
            lse[tokens] = merged_lse
        if sinks is not None:
            lse_with_sinks = torch.logaddexp(lse, sinks.to(lse.dtype))
            out *= (lse - lse_with_sinks).exp()[..., None]
            lse = lse_with_sinks
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.parts, ctx.scale = parts, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Sum the parts' gradients. Each part's backward kernel takes the merged output and `lse`."""
        q, k, v, sinks, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        for part in ctx.parts:
            inputs = (
                *(part.padded_queries(x) for x in (grad, q)), *(part.padded_keys(x) for x in (k, v)),
                *(part.padded_queries(x) for x in (out, lse)),
            )  # fmt: skip
            q_gradient, k_gradient, v_gradient = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *inputs, 0.0, part.is_causal, attn_mask=part.bias(q.dtype), scale=ctx.scale
            )
            dq[part.query_tokens] += part.unpad_queries(q_gradient)
            dk[part.key_tokens] += part.unpad_keys(k_gradient)
            dv[part.key_tokens] += part.unpad_keys(v_gradient)
        sink_gradient = None
        if sinks is not None:
            # A sink has no value: its score only takes weight from the keys.
            weight = (sinks.to(lse.dtype) - lse).exp()
            sink_gradient = -(weight * (grad.to(lse.dtype) * out).sum(-1)).sum(0).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), sink_gradient, None, None


def _group_blocks(
    query_starts: NDArray[np.int64],
    query_ends: NDArray[np.int64],
    key_starts: NDArray[np.int64],
    key_ends: NDArray[np.int64],
    *,
    is_causal: bool,
    device: torch.device,
) -> list[TreePart]:
    """Return the calls of the attention kernel for blocks of the score matrix. Blocks of similar sizes share a call.

    Block i has the queries from `query_starts[i]` to `query_ends[i]`. All arrays are [blocks].
    """
    num_queries, num_keys = query_ends - query_starts, key_ends - key_starts
    # By number of keys, then of queries: a block has at least the keys of all blocks before it.
    blocks_by_size = np.lexsort((num_queries, num_keys))
    blocks_by_call: list[list[int]] = []
    call_scores = 0
    for block in blocks_by_size.tolist():
        block_scores = int(num_queries[block] * num_keys[block])
        if blocks_by_call:
            # A call pads all its blocks to the most queries and keys. Share it only if the padding costs less than a
            # call of its own.
            members = [*blocks_by_call[-1], block]
            padded_scores = len(members) * int(num_queries[members].max()) * int(num_keys[block])
            if padded_scores <= (1 + _WASTED_SHARE) * (call_scores + block_scores) + _CALL_SCORES:
                blocks_by_call[-1].append(block)
                call_scores += block_scores
                continue
        blocks_by_call.append([block])
        call_scores = block_scores
    return [
        _make_part(query_starts[blocks], num_queries[blocks], key_starts[blocks], num_keys[blocks], is_causal, device)
        for blocks in (np.sort(np.array(members)) for members in blocks_by_call)
    ]


def _make_part(
    query_starts: NDArray[np.int64],
    num_queries: NDArray[np.int64],
    key_starts: NDArray[np.int64],
    num_keys: NDArray[np.int64],
    is_causal: bool,
    device: torch.device,
) -> TreePart:
    """Return one kernel call for blocks [blocks] of queries and keys, padded to the largest block."""
    longest = int(num_keys.max())
    mask = None
    # A causal mask already excludes padding, which follows the keys of every query.
    if not is_causal and num_keys.min() < longest:
        mask = torch.from_numpy(np.arange(longest) < num_keys[:, None])[:, None, None].to(device)
    return TreePart(
        queries=_list_block_tokens(query_starts, num_queries, device),
        keys=_list_block_tokens(key_starts, num_keys, device),
        query_shape=(len(num_queries), int(num_queries.max())),
        key_shape=(len(num_keys), longest),
        is_causal=is_causal,
        mask=mask,
        is_first=is_causal,
    )


def _list_block_tokens(
    starts: NDArray[np.int64], sizes: NDArray[np.int64], device: torch.device
) -> slice | tuple[Tensor, Tensor]:
    """Return the tokens of some blocks: a slice for one block, else (indices in the padded array, tokens),
    [tokens] each.
    """
    if len(starts) == 1:
        return slice(int(starts[0]), int(starts[0] + sizes[0]))
    padded_indices = ranges(np.arange(len(sizes)) * sizes.max(), sizes)
    return torch.from_numpy(padded_indices).to(device), torch.from_numpy(ranges(starts, sizes)).to(device)


def _pad_blocks(x: Tensor, tokens: slice | tuple[Tensor, Tensor], shape: tuple[int, int]) -> Tensor:
    """Return the entries of `x` at `tokens` as [blocks, heads, length, ...], padded by zeros.

    `shape`: (blocks, length).
    """
    if isinstance(tokens, slice):
        return x[tokens].transpose(0, 1)[None]
    padded_indices, token_indices = tokens
    padded = x.new_zeros(shape[0] * shape[1], *x.shape[1:]).index_copy_(
        0, padded_indices, x.index_select(0, token_indices)
    )
    return padded.view(*shape, *x.shape[1:]).transpose(1, 2)


def _unpad_blocks(padded: Tensor, tokens: slice | tuple[Tensor, Tensor]) -> Tensor:
    if isinstance(tokens, slice):
        return padded[0].transpose(0, 1)
    return padded.transpose(1, 2).flatten(0, 1).index_select(0, tokens[0])


def _list_block_borders(size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first and the last token of each mask block, [blocks] each, for a mask over `size` tokens."""
    firsts = np.arange(0, size, _MASK_BLOCK)
    return firsts, np.minimum(firsts + _MASK_BLOCK, size) - 1


def _list_blocks(is_listed: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the number of listed blocks per row, [1, 1, rows], and all columns, [1, 1, rows, columns].

    `is_listed` is bool [rows, columns]. The columns of listed blocks come first.
    """
    counts = is_listed.sum(1).astype(np.int32)
    columns = np.argsort(~is_listed, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(counts).to(device)[None, None], torch.from_numpy(columns).to(device)[None, None]
