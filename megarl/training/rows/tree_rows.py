"""Rows that store each distinct prefix of their sequences once: a tree of prefixes.

A stored token belongs to all sequences that begin with its prefix. An edge is one prediction: a stored token and a
distinct next token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megarl.data.prefixes import PrefixTree, chunk_owners, chunk_sizes, prefix_tree
from megarl.data.token_batch import TokenBatch, places_by_rank, ranges, select_retained
from megarl.models.trees.attention import TokenTree
from megarl.models.trees.row import TreeRow, TreeTokens
from megarl.rounding import round_up
from megarl.training.rows.microbatch import Microbatch, is_predicted, support_on


@dataclass(frozen=True, slots=True)
class TreeMicrobatch(Microbatch):
    """A microbatch stored as a tree.

    `input_ids` is [1, stored tokens of this rank], `labels` [1, edges]. `support` and `temperature` have one value per
    edge too. All other tensors have one value per token of the separate sequences, without padding.
    """

    def make_row_tokens(self, num_parts: int = 1, part: int = 0) -> TreeTokens:
        """Return the stored tokens of part `part` of `num_parts`, and for each token of the sequences the stored one in
        this part.
        """
        assert isinstance(self.row, TreeRow) and self.row.host_local is not None
        tree = self.row.tree
        device = tree.reach.device
        part_size = len(tree.own_tokens) // num_parts
        index_in_part = tree.host_stored_of - part * part_size
        is_in_part = (index_in_part >= 0) & (index_in_part < part_size)
        sequences = np.repeat(np.arange(len(self.lengths)), self.lengths)[self.row.host_local][is_in_part]
        return TreeTokens(
            sequences=torch.from_numpy(sequences).to(device),
            weights=torch.from_numpy(tree.num_represented[part * part_size : (part + 1) * part_size]).to(device),
            lengths=torch.from_numpy(self.lengths.astype(np.float32)).to(device),
            stored_of=torch.from_numpy(index_in_part[is_in_part]).to(device),
        )

    def represented_tokens(self) -> NDArray[np.int64]:
        """Return, for each token stored on this rank, its index in the row of separate sequences: [own tokens].

        If several sequences share a stored token, it is the index in the last of them. Padding has -1.
        """
        assert isinstance(self.row, TreeRow) and self.row.host_local is not None
        tokens = np.full(len(self.row.tree.own_tokens), -1)
        tokens[self.row.tree.host_stored_of] = self.row.host_local
        return tokens


def pack_tree(batch: TokenBatch, *, multiple: int, device: torch.device, cp: int, cp_rank: int) -> TreeMicrobatch:
    """Return a context-parallel rank's part of a row that stores each distinct prefix of the sequences once.

    Padding makes each rank's number of stored tokens a multiple of `multiple`. No token attends to the padding.
    """
    tree = prefix_tree(batch.prefix_keys, batch.cu_seqlens)
    split = _split_tree(tree, cp, multiple)
    rank_of_token = split.ranks[tree.stored_of]
    local_tokens = np.flatnonzero(rank_of_token == cp_rank)
    # A token's prediction is computed at the stored token before it.
    predicted_tokens, sequences = np.flatnonzero(is_predicted(batch.cu_seqlens)), None
    predicted_tokens = predicted_tokens[rank_of_token[predicted_tokens - 1] == cp_rank]
    if batch.temperatures is not None and (batch.temperatures != batch.temperatures[0]).any():
        sequences = np.repeat(np.arange(batch.num_sequences), batch.lengths)
    first_prediction_of_edge, edge_of_token = _merge_equal_predictions(batch, tree, predicted_tokens, sequences)
    edge_tokens = predicted_tokens[first_prediction_of_edge]
    edges = np.zeros(len(batch.token_ids), np.int64)
    # Position t predicts token t + 1, so a token's edge is stored one position earlier.
    edges[predicted_tokens - 1] = edge_of_token

    def select_predictions(values: np.ndarray) -> Tensor:
        """Return values [tokens] of predicted tokens, stored at the token before each one, for this rank."""
        shifted = np.zeros_like(values)
        shifted[predicted_tokens - 1] = values[predicted_tokens]
        return torch.from_numpy(shifted[local_tokens]).to(device)

    support = None
    if batch.retained_sets is not None:
        support = support_on(device, select_retained(batch.retained_sets, edge_tokens))
    temperature: float | Tensor = 1.0 if batch.temperatures is None else float(batch.temperatures[0])
    if sequences is not None and batch.temperatures is not None:
        edge_temperatures = batch.temperatures[sequences[edge_tokens]].astype(np.float32)
        temperature = torch.from_numpy(edge_temperatures).to(device)
    input_ids = np.append(batch.token_ids[tree.source], np.zeros(len(split.ranks) - len(tree.source), np.int64))
    own_tree = _make_token_tree(
        tree, split, cp_rank, device, local_tokens, edges, tree.parent[tree.stored_of[edge_tokens]]
    )
    return TreeMicrobatch(
        input_ids=torch.from_numpy(input_ids[own_tree.own_tokens]).to(device)[None],
        labels=torch.from_numpy(batch.token_ids[edge_tokens]).to(device)[None],
        row=TreeRow.from_tree(own_tree, rank_of_token, int(batch.lengths.max()), cp_rank),
        mask=select_predictions(batch.loss_mask),
        per_token={name: select_predictions(values) for name, values in batch.per_token.items()},
        lengths=batch.lengths,
        padded_lengths=batch.lengths,
        samples=batch.samples,
        support=support,
        temperature=temperature,
    )


def _merge_equal_predictions(
    batch: TokenBatch, tree: PrefixTree, tokens: NDArray[np.int64], sequences: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the edges of the predicted tokens `tokens` [predicted]: each edge's first token [edges], and each token's
    edge [predicted].

    Equal predictions of one stored token are one edge. They differ if the temperatures of their `sequences` [tokens] or
    their sets of sampled tokens differ.
    """
    keys = [tree.stored_of[tokens]]
    if sequences is not None and batch.temperatures is not None:
        _, temperature_numbers = np.unique(batch.temperatures, return_inverse=True)
        keys.append(temperature_numbers[sequences[tokens]])
    if batch.retained_sets is not None:
        # Comparing the sets would cost more than it saves: answers rarely begin with the same tokens.
        keys.append(np.where(batch.retained_sets.counts[tokens] > 0, tokens, -1))
    if len(keys) == 1:
        _, first_tokens, edge_of_token = np.unique(keys[0], return_index=True, return_inverse=True)
    else:
        _, first_tokens, edge_of_token = np.unique(np.stack(keys, 1), axis=0, return_index=True, return_inverse=True)
    return first_tokens, edge_of_token


class _Split(NamedTuple):
    """The stored tokens of a tree and its padding, split over context-parallel ranks.

    `ranks` is [stored tokens]. `chunks` [chunks, 3] has the first token of the chunk's segment, the chunk's first token
    and its end. `padding` [cp] counts the tokens of each rank's last segment.
    """

    ranks: NDArray[np.int64]
    chunks: NDArray[np.int64]
    padding: NDArray[np.int64]


def _split_tree(tree: PrefixTree, cp: int, multiple: int) -> _Split:
    """Cut each segment into chunks for `cp` ranks. Padding gives all ranks the same multiple of `multiple` tokens."""
    # The rank of each chunk of a segment [chunks of a segment]. Sizes and ends are [segments, chunks of a segment].
    owners = chunk_owners(cp)
    sizes = chunk_sizes(tree.ends - tree.starts, owners)
    ends = tree.starts[:, None] + sizes.cumsum(1)
    ranks = np.repeat(np.tile(owners, len(sizes)), sizes.ravel())
    num_tokens = np.bincount(ranks, minlength=cp)
    padding = round_up(num_tokens.max(), multiple=multiple) - num_tokens
    # Each rank's padding follows all stored tokens, as a segment with one chunk.
    padding_ends = len(ranks) + padding.cumsum()
    padding_starts = padding_ends - padding
    chunks = np.stack([np.repeat(tree.starts, len(owners)), (ends - sizes).ravel(), ends.ravel()], 1)
    padding_chunks = np.stack([padding_starts, padding_starts, padding_ends], 1)
    chunks = np.concatenate([chunks, padding_chunks])
    return _Split(
        ranks=np.append(ranks, np.repeat(np.arange(cp), padding)),
        chunks=chunks[chunks[:, 2] > chunks[:, 1]],
        padding=padding,
    )


def _make_token_tree(
    tree: PrefixTree,
    split: _Split,
    cp_rank: int,
    device: torch.device,
    local: NDArray[np.int64],
    edges: NDArray[np.int64],
    edge_sources: NDArray[np.int64],
) -> TokenTree:
    """Return the tree for the model's layers on a context-parallel rank, with the padding as last segments.

    `local` [own tokens]: tokens of the sequences stored on this rank. `edges` [tokens]: the edge after each token.
    `edge_sources` [edges]: the stored token before each edge.
    """
    num_stored, padding = len(tree.parent), split.padding
    padding_ends = num_stored + padding.cumsum()
    padding_starts, padding_ends = (padding_ends - padding)[padding > 0], padding_ends[padding > 0]
    own_tokens = np.flatnonzero(split.ranks == cp_rank)
    gathered_index = None
    if len(padding) > 1:
        gathered_index = torch.from_numpy(places_by_rank(split.ranks)[0]).to(device)
    num_represented = np.append(tree.num_represented, np.zeros(padding.sum(), np.int64))
    stored_of = np.searchsorted(own_tokens, tree.stored_of[local])
    return TokenTree(
        reach=torch.from_numpy(np.append(tree.reach, np.repeat(padding_ends, padding_ends - padding_starts))).to(
            device
        ),
        starts=np.append(tree.starts, padding_starts),
        ends=np.append(tree.ends, padding_ends),
        reaches=np.append(tree.reach[tree.starts], padding_ends),
        positions=np.append(tree.depth, ranges(np.zeros_like(padding_starts), padding_ends - padding_starts)),
        own_tokens=own_tokens,
        chunks=split.chunks[split.ranks[split.chunks[:, 1]] == cp_rank],
        gathered_index=gathered_index,
        num_represented=num_represented[own_tokens],
        stored_of=torch.from_numpy(stored_of).to(device),
        host_stored_of=stored_of,
        edge_sources=torch.from_numpy(np.searchsorted(own_tokens, edge_sources)).to(device),
        edges=torch.from_numpy(edges[local]).to(device),
    )
