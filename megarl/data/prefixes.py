"""Trees of shared prefixes: each distinct prefix of a row's sequences is stored once.

In lexicographic order, a sequence shares its longest prefix with the sequence before it, and only its remaining tokens
are new. These new tokens, in this order, are the tree's tokens in depth-first order.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Order = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Sequences in lexicographic order, and each one's number of tokens shared with the sequence before: both
[sequences].
"""


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """The tree of a row's sequences. Its tokens are stored in depth-first order: children follow their parent.

    Arrays [stored tokens]: `source` is the index of one represented token. `parent` is the stored token before it, -1
    at a root. `depth` is its position in the sequence. `reach` is the end of the tokens that attend to it: token q
    attends to token k if k <= q < reach[k]. `stored_of` [represented tokens] is the stored token of each token of the
    sequences.

    A segment is a longest run of stored tokens without a branch. Its stored tokens are `starts` to `ends` [segments].
    """

    source: NDArray[np.int64]
    parent: NDArray[np.int64]
    depth: NDArray[np.int64]
    reach: NDArray[np.int64]
    stored_of: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    @property
    def num_represented(self) -> NDArray[np.int64]:
        """Return the number of the sequences' tokens that each stored token represents: [stored tokens]."""
        return np.bincount(self.stored_of, minlength=len(self.parent))


def digests(values: NDArray[np.integer]) -> NDArray[np.uint32]:
    """Return a hash of each token's values: uint32 [tokens], never 0. `values` [tokens, ...] are integers below 2^15.

    Equal values have equal hashes in every process. Unequal values collide with a probability of about 2^-31.
    """
    rows = np.ascontiguousarray(values, np.int16).reshape(len(values), -1)
    return np.array([zlib.crc32(row.data) or 1 for row in rows], np.uint32)


def lexicographic_order(keys: NDArray[np.int64], cu_seqlens: NDArray[np.int64]) -> Order:
    """Return the sequences in lexicographic order, and the number of tokens shared with the sequence before.

    Equal sequences keep their order. `keys` [tokens] are token ids or other numbers from 0 on. Tokens with different
    keys are never shared. `cu_seqlens` is [sequences + 1].
    """
    sequences = [keys[start:end] for start, end in pairwise(cu_seqlens)]
    # Big-endian bytes of numbers, which are not negative, compare like the numbers themselves.
    sort_keys = [sequence.astype(">u8").tobytes() for sequence in sequences]
    order = sorted(range(len(sort_keys)), key=sort_keys.__getitem__)
    shared = np.zeros(len(order), np.int64)
    for position in range(1, len(order)):
        shared[position] = common_prefix(sequences[order[position - 1]], sequences[order[position]])
    return np.array(order, np.int64), shared


def common_prefix(tokens: NDArray[np.int64], other_tokens: NDArray[np.int64]) -> int:
    """Return the number of leading tokens that two sequences [tokens] share."""
    length = min(len(tokens), len(other_tokens))
    differs = tokens[:length] != other_tokens[:length]
    first_difference = int(differs.argmax()) if length else 0
    return first_difference if length and differs[first_difference] else length


def shared_lengths(keys: NDArray[np.int64], cu_seqlens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many leading tokens of each sequence the tree stores with another sequence: [sequences].

    `keys` [tokens] and `cu_seqlens` [sequences + 1] are described in `lexicographic_order`.
    """
    order, shared = lexicographic_order(keys, cu_seqlens)
    lengths = np.zeros_like(shared)
    lengths[order] = shared
    return lengths


def prefix_tree(keys: NDArray[np.int64], cu_seqlens: NDArray[np.int64]) -> PrefixTree:
    """Return the tree of the sequences with keys [tokens] and boundaries [sequences + 1] as in
    `lexicographic_order`.
    """
    order, shared = lexicographic_order(keys, cu_seqlens)
    stored_of = np.empty(len(keys), np.int64)
    sources, parents, depths, starts = [], [], [], []
    path, num_stored = np.zeros(0, np.int64), 0
    for sequence, num_shared in zip(order.tolist(), shared.tolist(), strict=True):
        start, end = int(cu_seqlens[sequence]), int(cu_seqlens[sequence + 1])
        length = end - start
        if num_shared < length:
            new_tokens = np.arange(num_stored, num_stored + length - num_shared)
            parent = new_tokens - 1
            parent[0] = path[num_shared - 1] if num_shared else -1
            if num_shared < len(path) or not num_shared:
                # The path so far and the new tokens diverge here. Each continues in a new segment.
                starts += [num_stored, *path[num_shared : num_shared + 1].tolist()]
            sources.append(np.arange(start + num_shared, end))
            parents.append(parent)
            depths.append(np.arange(num_shared, length))
            path = np.concatenate([path[:num_shared], new_tokens])
            num_stored += length - num_shared
        # Only a sequence equal to the one before adds nothing: a mere prefix is sorted earlier.
        stored_of[start:end] = path
    # A segment is a run of tokens without a branch. It ends where the next one starts.
    segments = np.unique(np.array(starts, np.int64))
    ends = np.append(segments[1:], num_stored)[: len(segments)]
    depth = np.concatenate([*depths, np.zeros(0, np.int64)])
    return PrefixTree(
        source=np.concatenate([*sources, np.zeros(0, np.int64)]),
        parent=np.concatenate([*parents, np.zeros(0, np.int64)]),
        depth=depth,
        reach=np.repeat(_find_subtree_ends(depth[segments], num_stored, segments), ends - segments),
        stored_of=stored_of,
        starts=segments,
        ends=ends,
    )


def chunk_owners(cp: int) -> NDArray[np.int64]:
    """Return the context-parallel rank of each chunk of a segment: [chunks].

    A single rank has the whole segment. Rank r of several has chunks r and 2 * cp - 1 - r (zigzag), so attention costs
    all ranks about the same.
    """
    ranks = np.arange(cp)
    return np.concatenate([ranks, ranks[::-1]]) if cp > 1 else ranks


def chunk_sizes(sizes: NDArray[np.int64], owners: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of tokens in each chunk of each segment, for context parallelism: [segments, chunks].

    `sizes` [segments] are in tokens, `owners` [chunks] are the ranks of `chunk_owners`. The remainder of an uneven
    division goes, token by token, to the ranks with the fewest tokens in earlier segments.
    """
    count = len(owners)
    chunks = np.repeat(sizes[:, None] // count, count, axis=1)
    surplus = np.zeros(owners.max() + 1, np.int64)
    for segment, remainder in enumerate((sizes % count).tolist()):
        receivers = np.argsort(surplus[owners], kind="stable")[:remainder]
        chunks[segment, receivers] += 1
        surplus += np.bincount(owners[receivers], minlength=len(surplus))
    return chunks


def _find_subtree_ends(depths: NDArray[np.int64], num_stored: int, starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the end of each segment's subtree [segments], from the depths of the segments' first tokens.

    A subtree ends at the next segment that does not begin deeper.
    """
    subtree_ends = np.full(len(starts), num_stored, np.int64)
    open_segments: list[int] = []
    for segment, depth in enumerate(depths.tolist()):
        while open_segments and depths[open_segments[-1]] >= depth:
            subtree_ends[open_segments.pop()] = starts[segment]
        open_segments.append(segment)
    return subtree_ends
