"""Microbatches: packed rows of sequences, as tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from megarl.data.prefixes import PrefixTree, chunk_owners, chunk_sizes, prefix_tree
from megarl.data.token_batch import TokenBatch, borders, places_by_rank, ranges, select_retained
from megarl.models.attention import PackedRow
from megarl.models.expert_balance import RowTokens
from megarl.models.logprobs import Support
from megarl.models.tree_attention import TokenTree


class MtpTargets(NamedTuple):
    """Targets of the MTP layers: at position t, values of the sequence's token t + 2. All are [tokens].

    Positions whose token t + 2 is not trained have mask False and weight zero.
    """

    labels: Tensor
    mask: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A microbatch: one packed row. All tensors are [tokens] except `input_ids` and `labels`, [1, tokens].

    Position t of a sequence predicts its token t + 1, so values of this token are stored at t. The last position of a
    sequence and the padding predict nothing: their mask is False and their weight zero.

    If the row is a tree of prefixes, `input_ids` is [1, stored tokens of this rank], `labels` [1, edges]. `support` and
    `temperature` belong to edges too. All other tensors are those of the sequences' tokens, without padding.
    """

    input_ids: Tensor
    labels: Tensor
    row: PackedRow
    mask: Tensor
    per_token: dict[str, Tensor]
    """Values of each token by name: `token_weights`, `advantages`, `old_logprobs` and others."""
    lengths: NDArray[np.int64]
    padded: NDArray[np.int64]
    """[sequences]: number of tokens of each sequence of the whole row with padding; `lengths` is the number without."""
    samples: NDArray[np.int64]
    """[sequences]: for each sequence, the number of its sample, ascending. A sample may have several sequences
    (segments)."""
    support: Support | None = None
    """For each token, the set of tokens over which its log-prob is renormalised. None: the whole vocabulary
    everywhere.
    """
    temperature: float | Tensor = 1.0
    """Sampling temperature applied to the log-probs: one for all tokens, or [tokens]."""
    mtp: MtpTargets | None = None
    """Targets of the MTP layers, if these are trained."""


def pack_row(
    batch: TokenBatch,
    *,
    multiple: int,
    qkv_format: str,
    device: torch.device,
    cp: int = 1,
    cp_rank: int = 0,
    trains_mtp: bool = False,
) -> Microbatch:
    """Return the row of a batch's sequences, or a context-parallel rank's part of it.

    `trains_mtp` adds the targets of MTP layers.
    With cp > 1 each sequence is padded to a multiple of 2 * cp. The last one is padded further, so the tokens of
    the row are a multiple of cp * `multiple`.
    """
    # Sequences of one token each have no prediction to store.
    if batch.shares_prefixes and batch.lengths.max() > 1:
        return _pack_tree(batch, multiple=multiple, device=device, cp=cp, cp_rank=cp_rank)
    lengths = batch.lengths
    padded = padded_lengths(lengths, cp=cp, multiple=multiple)
    row = PackedRow.from_lengths(padded.tolist(), device, qkv_format, cp=cp, cp_rank=cp_rank)
    assert row.host_local is not None
    local = row.host_local
    places, predicted = places_in_row(lengths, padded), is_predicted(batch.cu_seqlens)

    def own_part(values: np.ndarray, at: np.ndarray) -> Tensor:
        whole = np.zeros((padded.sum(), *values.shape[1:]), values.dtype)
        whole[at] = values
        return torch.from_numpy(whole[local]).to(device)

    def own_tokens(values: np.ndarray) -> Tensor:
        return own_part(values, places)

    def own_predictions(values: np.ndarray) -> Tensor:
        return own_part(values[predicted], places[predicted] - 1)

    mtp = None
    if trains_mtp:
        # Neither of a sequence's first two tokens is the second one after a position.
        beyond = predicted & np.roll(predicted, 1)
        weighed = (batch.token_ids, batch.loss_mask, batch.per_token["token_weights"])
        mtp = MtpTargets(*(own_part(values[beyond], places[beyond] - 2) for values in weighed))
    support = None
    if batch.retained_sets is not None:
        # For each position: the index of its predicted token, or -1 if it predicts none.
        token = np.full(padded.sum(), -1, np.int64)
        token[places[predicted] - 1] = np.flatnonzero(predicted)
        kept = select_retained(batch.retained_sets, token[local])
        support = Support(torch.from_numpy(kept.token_ids).to(device), torch.from_numpy(kept.counts).to(device))
    return Microbatch(
        lengths=lengths,
        padded=padded,
        samples=batch.samples,
        input_ids=own_tokens(batch.token_ids)[None],
        labels=own_predictions(batch.token_ids)[None],
        row=row,
        mask=own_predictions(batch.loss_mask),
        per_token={name: own_predictions(values) for name, values in batch.per_token.items()},
        support=support,
        temperature=_temperature(batch.temperatures, padded, local, device),
        mtp=mtp,
    )


def _pack_tree(batch: TokenBatch, *, multiple: int, device: torch.device, cp: int, cp_rank: int) -> Microbatch:
    """Return a context-parallel rank's part of the row of a batch's sequences, with each distinct prefix stored once.

    The stored tokens of each rank are padded to a multiple of `multiple` by a segment that nothing else attends to.
    """
    tree = prefix_tree(batch.prefix_keys, batch.cu_seqlens)
    split = _split_tree(tree, cp, multiple)
    holders = split.ranks[tree.stored_of]
    local = np.flatnonzero(holders == cp_rank)
    # A token's prediction is computed where the token before it is stored.
    tokens, sequences = np.flatnonzero(is_predicted(batch.cu_seqlens)), None
    tokens = tokens[holders[tokens - 1] == cp_rank]
    if batch.temperatures is not None and (batch.temperatures != batch.temperatures[0]).any():
        sequences = np.repeat(np.arange(batch.num_sequences), batch.lengths)
    first, edge = _edges(batch, tree, tokens, sequences)
    chosen = tokens[first]
    edges = np.zeros(len(batch.token_ids), np.int64)
    # Position t predicts token t + 1.
    edges[tokens - 1] = edge

    def predictions(values: np.ndarray) -> Tensor:
        shifted = np.zeros_like(values)
        shifted[tokens - 1] = values[tokens]
        return torch.from_numpy(shifted[local]).to(device)

    support = None
    if batch.retained_sets is not None:
        kept = select_retained(batch.retained_sets, chosen)
        support = Support(torch.from_numpy(kept.token_ids).to(device), torch.from_numpy(kept.counts).to(device))
    temperature: float | Tensor = 1.0 if batch.temperatures is None else float(batch.temperatures[0])
    if sequences is not None and batch.temperatures is not None:
        of_edges = batch.temperatures[sequences[chosen]].astype(np.float32)
        temperature = torch.from_numpy(of_edges).to(device)
    input_ids = np.append(batch.token_ids[tree.source], np.zeros(len(split.ranks) - len(tree.source), np.int64))
    own_tree = _token_tree(tree, split, cp_rank, device, local, edges, tree.parent[tree.stored_of[chosen]])
    return Microbatch(
        input_ids=torch.from_numpy(input_ids[own_tree.own]).to(device)[None],
        labels=torch.from_numpy(batch.token_ids[chosen]).to(device)[None],
        row=PackedRow.from_tree(own_tree, holders, int(batch.lengths.max()), cp_rank),
        mask=predictions(batch.loss_mask),
        per_token={name: predictions(values) for name, values in batch.per_token.items()},
        lengths=batch.lengths,
        padded=batch.lengths,
        samples=batch.samples,
        support=support,
        temperature=temperature,
    )


def _edges(
    batch: TokenBatch, tree: PrefixTree, tokens: NDArray[np.int64], sequences: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first of the predicted tokens `tokens` [predicted] for each edge [edges], and each one's edge.

    Predictions of one stored token are one edge, unless their distributions differ. With `sequences` [tokens], the
    sequence of each token, the edges of sequences with different temperatures differ. A token with a retained set of
    its own has an edge of its own.
    """
    keys = [tree.stored_of[tokens]]
    if sequences is not None and batch.temperatures is not None:
        _, temperature = np.unique(batch.temperatures, return_inverse=True)
        keys.append(temperature[sequences[tokens]])
    if batch.retained_sets is not None:
        # Comparing the sets would cost more than it saves: answers rarely begin with the same tokens.
        keys.append(np.where(batch.retained_sets.counts[tokens] > 0, tokens, -1))
    if len(keys) == 1:
        _, first, edge = np.unique(keys[0], return_index=True, return_inverse=True)
    else:
        _, first, edge = np.unique(np.stack(keys, 1), axis=0, return_index=True, return_inverse=True)
    return first, edge


class _Split(NamedTuple):
    """The stored tokens of a tree and of its padding, split over context-parallel ranks.

    Shapes: `ranks` [stored tokens], each one's rank; `chunks` [chunks, 3], the first token of the chunk's segment, the
    chunk's first token and its end; `padding` [cp], tokens of the last segments, one for each rank.
    """

    ranks: NDArray[np.int64]
    chunks: NDArray[np.int64]
    padding: NDArray[np.int64]


def _split_tree(tree: PrefixTree, cp: int, multiple: int) -> _Split:
    """Split each segment of a tree over `cp` ranks. All have equally many tokens, a multiple of `multiple`."""
    owners = chunk_owners(cp)
    sizes = chunk_sizes(tree.ends - tree.starts, owners)
    ends = tree.starts[:, None] + sizes.cumsum(1)
    ranks = np.repeat(np.tile(owners, len(sizes)), sizes.ravel())
    counts = np.bincount(ranks, minlength=cp)
    padding = -(-counts.max() // multiple) * multiple - counts
    last_ends = len(ranks) + padding.cumsum()
    chunks = np.stack([np.repeat(tree.starts, len(owners)), (ends - sizes).ravel(), ends.ravel()], 1)
    last = np.stack([last_ends - padding, last_ends - padding, last_ends], 1)
    chunks = np.concatenate([chunks, last])
    return _Split(
        ranks=np.append(ranks, np.repeat(np.arange(cp), padding)),
        chunks=chunks[chunks[:, 2] > chunks[:, 1]],
        padding=padding,
    )


def _token_tree(
    tree: PrefixTree,
    split: _Split,
    cp_rank: int,
    device: torch.device,
    local: NDArray[np.int64],
    edges: NDArray[np.int64],
    sources: NDArray[np.int64],
) -> TokenTree:
    """Return a tree for the model's layers on a context-parallel rank, with the padding as last segments.

    `local` [own tokens] are the tokens of the sequences stored on this rank. `edges` [tokens] is the edge after each
    token, `sources` [edges] the stored token before each edge.
    """
    stored, padding = len(tree.parent), split.padding
    last_ends = stored + padding.cumsum()
    last_starts, last_ends = (last_ends - padding)[padding > 0], last_ends[padding > 0]
    own = np.flatnonzero(split.ranks == cp_rank)
    place = None
    if len(padding) > 1:
        place = torch.from_numpy(places_by_rank(split.ranks)[0]).to(device)
    num_represented = np.append(tree.num_represented, np.zeros(padding.sum(), np.int64))
    stored_of = np.searchsorted(own, tree.stored_of[local])
    return TokenTree(
        reach=torch.from_numpy(np.append(tree.reach, np.repeat(last_ends, last_ends - last_starts))).to(device),
        starts=np.append(tree.starts, last_starts),
        ends=np.append(tree.ends, last_ends),
        reaches=np.append(tree.reach[tree.starts], last_ends),
        positions=np.append(tree.depth, ranges(np.zeros_like(last_starts), last_ends - last_starts)),
        own=own,
        chunks=split.chunks[split.ranks[split.chunks[:, 1]] == cp_rank],
        place=place,
        num_represented=num_represented[own],
        stored_of=torch.from_numpy(stored_of).to(device),
        host_stored_of=stored_of,
        edge_sources=torch.from_numpy(np.searchsorted(own, sources)).to(device),
        edges=torch.from_numpy(edges[local]).to(device),
    )


def row_tokens(batch: Microbatch, parts: int = 1, part: int = 0) -> RowTokens:
    """Return part `part` of `parts` of this context-parallel rank's tokens of a row, as sequence parallelism splits
    them.
    """
    if batch.row.tree is not None:
        return _tree_tokens(batch, batch.row.tree, parts, part)
    assert batch.row.host_local is not None
    local = np.split(batch.row.host_local, parts)[part]
    starts = batch.padded.cumsum() - batch.padded
    sequences = np.repeat(np.arange(len(batch.padded)), batch.padded)[local]
    is_real = local - starts[sequences] < batch.lengths[sequences]
    device = batch.mask.device
    return RowTokens(
        torch.from_numpy(sequences).to(device),
        torch.from_numpy(is_real).to(device),
        torch.from_numpy(batch.lengths.astype(np.float32)).to(device),
    )


def _tree_tokens(batch: Microbatch, tree: TokenTree, parts: int, part: int) -> RowTokens:
    """Return part `part` of `parts` of this context-parallel rank's stored tokens of a tree."""
    assert batch.row.host_local is not None
    device = tree.reach.device
    size = len(tree.own) // parts
    stored = tree.host_stored_of - part * size
    is_own = (stored >= 0) & (stored < size)
    sequences = np.repeat(np.arange(len(batch.lengths)), batch.lengths)[batch.row.host_local][is_own]
    return RowTokens(
        torch.from_numpy(sequences).to(device),
        torch.from_numpy(tree.num_represented[part * size : (part + 1) * size]).to(device),
        torch.from_numpy(batch.lengths.astype(np.float32)).to(device),
        torch.from_numpy(stored[is_own]).to(device),
    )


def represented_tokens(batch: Microbatch) -> NDArray[np.int64]:
    """Return the index, in the row of separate sequences, of a token at each place of this context-parallel rank.

    The result is [places]. A place of a tree may hold equal tokens of several sequences: the last one's is returned.
    Padding places of a tree have -1. Without a tree, padding has places in the row like other tokens.
    """
    local = batch.row.host_local
    assert local is not None
    if batch.row.tree is None:
        return local
    found = np.full(len(batch.row.tree.own), -1)
    found[batch.row.tree.host_stored_of] = local
    return found


def _temperature(
    temperatures: NDArray[np.float64] | None, padded: NDArray[np.int64], local: NDArray[np.int64], device: torch.device
) -> float | Tensor:
    """Return the temperature shared by all sequences of a row, else float32 [local positions]."""
    if temperatures is None:
        return 1.0
    # A number needs no tensor, and dividing by it is cheaper than by one value per token.
    if (temperatures == temperatures[0]).all():
        return float(temperatures[0])
    return torch.from_numpy(np.repeat(temperatures, padded)[local].astype(np.float32)).to(device)


def places_in_row(lengths: NDArray[np.int64], padded: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of each token of the sequences in the padded row: [tokens]."""
    return ranges(padded.cumsum() - padded, lengths)


def is_predicted(cu_seqlens: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return bool [tokens]: False on the first token of each sequence, because nothing predicts it."""
    predicted = np.ones(cu_seqlens[-1], np.bool_)
    predicted[cu_seqlens[:-1]] = False
    return predicted


def padded_lengths(lengths: Sequence[int] | NDArray[np.int64], *, cp: int, multiple: int) -> NDArray[np.int64]:
    """Return the lengths of a row's sequences with padding.

    With cp > 1 each length is a multiple of 2 * cp. The last one makes the row a multiple of cp * `multiple`.
    """
    # Zigzag context parallelism cuts each sequence into 2 * cp chunks: rank r gets chunks r and 2 * cp - 1 - r.
    each = 2 * cp if cp > 1 else 1
    padded = -(-np.asarray(lengths, np.int64) // each) * each
    # Padding only the last sequence extends its chunks by the same length on every rank. All ranks' tokens then divide.
    whole = math.lcm(each, cp * multiple)
    padded[-1] += -padded.sum() % whole
    return padded


def unpack_row(
    values: NDArray[np.float32], lengths: NDArray[np.int64], padded: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return per-token values of a padded row in the batch's order: float32 [tokens], zero on first tokens."""
    predicted = is_predicted(borders(lengths))
    unpacked = np.zeros(len(predicted), np.float32)
    unpacked[predicted] = values[places_in_row(lengths, padded)[predicted] - 1]
    return unpacked


def whole_row(values: Tensor, row: PackedRow) -> Tensor:
    """Gather the whole row's values on every context-parallel rank, from `values` [tokens, ...] of each rank's part."""
    group: Any = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return values
    assert row.place is not None
    # Parts of a tree have different lengths, and a gather needs equal ones.
    padded = torch.cat([values, values.new_zeros(row.longest_part - len(values), *values.shape[1:])])
    parts = padded.new_empty(group.size() * len(padded), *padded.shape[1:])
    torch.distributed.all_gather_into_tensor(parts, padded, group=group)
    return parts.index_select(0, row.place)
