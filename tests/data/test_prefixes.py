"""Trees of prefixes against sets of prefixes written out."""

from __future__ import annotations

import numpy as np

from megarl.data.prefixes import chunk_owners, chunk_sizes, digests, prefix_tree, shared_lengths
from megarl.data.token_batch import TokenBatch, borders
from megarl.types import TrainingSequence


def test_a_tree_written_out() -> None:
    """A prompt 1 2 3 with three answers, one of them empty, and a sequence of its own before it in the row."""
    sequences = [[9, 8], [1, 2, 3, 4, 4], [1, 2, 3], [1, 2, 3, 5], [1, 2, 3, 4, 6]]
    tokens, cu_seqlens = np.concatenate(sequences), borders([len(sequence) for sequence in sequences])
    tree = prefix_tree(tokens, cu_seqlens)
    assert tokens[tree.source].tolist() == [1, 2, 3, 4, 4, 6, 5, 9, 8]
    assert tree.parent.tolist() == [-1, 0, 1, 2, 3, 3, 2, -1, 7]
    assert tree.depth.tolist() == [0, 1, 2, 3, 4, 4, 3, 0, 1]
    assert tree.starts.tolist() == [0, 3, 4, 5, 6, 7] and tree.ends.tolist() == [3, 4, 5, 6, 7, 9]
    assert tree.reach.tolist() == [7, 7, 7, 6, 5, 6, 7, 9, 9]
    assert tree.stored_of.tolist() == [7, 8, 0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 6, 0, 1, 2, 3, 5]
    assert tree.num_represented.tolist() == [4, 4, 4, 2, 1, 1, 1, 1, 1]
    assert shared_lengths(tokens, cu_seqlens).tolist() == [0, 3, 0, 3, 4]


def test_chunks_balance_ranks() -> None:
    """Rank 0 has the chunks 0 and 3 of each segment, rank 1 the chunks 1 and 2."""
    assert chunk_sizes(np.array([8, 3, 1, 2, 5]), chunk_owners(2)).tolist() == [
        [2, 2, 2, 2], [1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0], [2, 1, 1, 1],
    ]  # fmt: skip
    sizes = np.random.default_rng(0).integers(0, 20, 400)
    chunks = chunk_sizes(sizes, chunk_owners(4))
    assert (chunks.sum(1) == sizes).all() and (chunks.max(1) - chunks.min(1) <= 1).all()
    by_rank = (chunks + chunks[:, ::-1])[:, :4].sum(0)
    assert by_rank.max() - by_rank.min() <= 2


def test_hashes_tell_experts_apart() -> None:
    experts = np.random.default_rng(0).integers(0, 128, (50, 6, 4)).astype(np.int16)
    found = digests(experts)
    assert found.dtype == np.uint32 and found.all() and (digests(experts[7:9]) == found[7:9]).all()
    for layer, place in np.ndindex(6, 4):
        other = experts.copy()
        other[:, layer, place] ^= 1
        assert (digests(other) != found).all()


def test_tokens_with_other_experts_are_not_shared() -> None:
    batch = TokenBatch.from_sequences([TrainingSequence(np.array([5, 6, 7, 8]), np.ones(4, bool)) for _ in range(2)])
    batch.experts = np.array([[0, 0], [0, 1]])
    assert shared_lengths(batch.prefix_keys, batch.cu_seqlens).tolist() == [0, 0]
    batch.expert_digests = np.array([1, 2, 3, 0, 1, 2, 9, 0], np.uint32)
    assert shared_lengths(batch.prefix_keys, batch.cu_seqlens).tolist() == [0, 2]
    assert batch.select([1]).with_arrays({}).expert_digests is not None


def test_random_trees_store_each_prefix_once() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        num_tokens = int(random.integers(1, 4))
        sequences = [random.integers(0, num_tokens, random.integers(1, 12)) for _ in range(random.integers(1, 9))]
        tokens, cu_seqlens = np.concatenate(sequences), borders([len(sequence) for sequence in sequences])
        tree = prefix_tree(tokens, cu_seqlens)
        size = len(tree.parent)
        distinct = {tuple(sequence[: end + 1]) for sequence in sequences for end in range(len(sequence))}
        assert size == len(distinct) == len(tokens) - shared_lengths(tokens, cu_seqlens).sum()
        for sequence, start in zip(sequences, cu_seqlens[:-1], strict=True):
            path = tree.stored_of[start : start + len(sequence)]
            assert tokens[tree.source[path]].tolist() == sequence.tolist()
            assert tree.depth[path].tolist() == list(range(len(sequence)))
            assert tree.parent[path].tolist() == [-1, *path[:-1].tolist()]
            for place, query in enumerate(path):
                attended = [key for key in range(size) if key <= query < tree.reach[key]]
                assert attended == path[: place + 1].tolist()
        # A segment begins at a root, or where its parent has other children too.
        children = np.bincount(tree.parent[tree.parent >= 0], minlength=size)
        branches = [token for token in range(size) if tree.parent[token] < 0 or children[tree.parent[token]] > 1]
        assert tree.starts.tolist() == branches
