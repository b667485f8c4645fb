"""The carriers of a tree's attention, against the softmax written out in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megarl.data.token_batch import TokenBatch
from megarl.models.attention import PackedRow
from megarl.models.trees.attention import TokenTree, attend, flex_attend, gather_entries
from megarl.models.trees.core_attention import with_trees
from megarl.models.trees.row import TreeRow
from megarl.training.rows.choice import make_microbatch
from megarl.types import TrainingSequence

HEADS, GROUPS, WIDTH, VALUES, SCALE = 4, 2, 16, 8, 0.3


def tree_of(sequences: list[np.ndarray], multiple: int = 1, cp: int = 1, cp_rank: int = 0) -> TokenTree:
    batch = TokenBatch.from_sequences([TrainingSequence(ids, np.ones(len(ids), bool)) for ids in sequences])
    batch.shares_prefixes = True
    device = torch.device("cpu")
    row = make_microbatch(batch, multiple=multiple, qkv_format="packed", device=device, cp=cp, cp_rank=cp_rank).row
    assert isinstance(row, TreeRow)
    return row.tree


def long_tree(cp: int = 1, cp_rank: int = 0) -> TokenTree:
    """Prompts of 300 and 40 tokens with answers of 4 to 200 tokens, so that whole blocks are attended to and others
    not.
    """
    random = np.random.default_rng(1)
    prompts = [random.integers(0, 50, 300), random.integers(0, 50, 40)]
    lengths = random.integers(4, 200, (2, 5)).tolist()
    return tree_of(
        [
            np.concatenate([prompt, random.integers(0, 50, length)])
            for prompt, answers in zip(prompts, lengths, strict=True)
            for length in answers
        ],
        64,
        cp,
        cp_rank,
    )


def deep_tree(seed: int, cp: int = 1, cp_rank: int = 0) -> TokenTree:
    """Sequences of few different tokens branch everywhere."""
    random = np.random.default_rng(seed)
    return tree_of([random.integers(0, 2, random.integers(2, 40)) for _ in range(9)], 7, cp, cp_rank)


TREES = [
    pytest.param(long_tree(), id="long"),
    *(pytest.param(deep_tree(seed), id=f"deep {seed}") for seed in range(3)),
    *(pytest.param(long_tree(2, rank), id=f"long, rank {rank} of cp 2") for rank in range(2)),
    *(pytest.param(deep_tree(3, 3, rank), id=f"deep 3, rank {rank} of cp 3") for rank in range(3)),
]


def inputs(tree: TokenTree, has_sinks: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    torch.manual_seed(3)
    own, size = len(tree.own_tokens), len(tree.positions)
    shapes = (own, HEADS, WIDTH), (size, GROUPS, WIDTH), (size, GROUPS, VALUES), (HEADS,)
    q, k, v, sinks = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    return q, k, v, sinks if has_sinks else None


def written_out(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, tree: TokenTree, window: int) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    scores = scores.masked_fill(~tree.attended_mask(window), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.size(1), 1)], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [0, 5, 1000])
@pytest.mark.parametrize("tree", TREES)
def test_carriers_agree(tree: TokenTree, window: int, has_sinks: bool) -> None:
    q, k, v, sinks = inputs(tree, has_sinks)
    given = [x for x in (q, k, v, sinks) if x is not None]
    expected = written_out(q, k, v, sinks, tree, window)
    found = attend(q, k, v, tree, scale=SCALE, window=window, sinks=sinks)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    gradient = torch.randn_like(expected)
    for got, want in zip(*(torch.autograd.grad(out, given, gradient) for out in (found, expected)), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    # Without a GPU, FlexAttention has no backward pass, and no kernel: it computes all scores with the mask's function.
    q, k, v, sinks = (None if x is None else x.detach() for x in (q, k, v, sinks))
    assert q is not None and k is not None and v is not None
    padded = F.pad(v, (0, WIDTH - VALUES))
    flexible = flex_attend(q, k, padded, tree, scale=SCALE, window=window, sinks=sinks)
    torch.testing.assert_close(flexible[..., :VALUES], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize("tree", TREES)
def test_blocks_of_the_mask_hold_what_is_attended(tree: TokenTree, window: int) -> None:
    mask, attended = tree.block_mask(window), tree.attended_mask(window)
    queries, keys = attended.shape
    blocks = F.pad(attended, (0, -keys % 128, 0, -queries % 128)).unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    some, full = blocks.any(3).any(1), blocks.all(3).all(1)
    named, whole = (
        block_table(counts, columns)
        for counts, columns in (
            (mask.kv_num_blocks, mask.kv_indices),
            (mask.full_kv_num_blocks, mask.full_kv_indices),
        )
    )
    assert not (some & ~(named | whole)).any(), "a block is missing"
    assert not (whole & ~full).any(), "a block counts as whole"
    assert not (named & whole).any()


def block_table(counts: Tensor | None, columns: Tensor | None) -> Tensor:
    """The named blocks of a mask, bool [blocks of queries, blocks of keys]."""
    assert counts is not None and columns is not None
    table = torch.zeros(columns.shape[-2:], dtype=torch.bool)
    for row, count in enumerate(counts[0, 0].tolist()):
        table[row, columns[0, 0, row, :count].long()] = True
    return table


class Plain(torch.nn.Module):
    """A core attention with the arguments of Transformer Engine's, for rows of separate sequences."""

    def __init__(self, config: Any, layer_number: int, *, softmax_scale: float | None) -> None:
        super().__init__()

    def forward(self, query: Tensor, *_: Any, packed_seq_params: PackedRow) -> Tensor:
        return query


def test_another_core_attention_computes_trees_too() -> None:
    tree = deep_tree(0)
    q, k, v, _ = inputs(tree, False)
    v = F.pad(v, (0, WIDTH - VALUES))
    config: Any = SimpleNamespace(kv_channels=WIDTH, window_size=(4, 0), window_attn_skip_freq=[0, 1])
    row = TreeRow.from_tree(tree, np.zeros(len(tree.stored_of), np.int64), 40)
    for layer_number, window in ((1, 0), (2, 5)):
        attention = with_trees(Plain)(config=config, layer_number=layer_number, softmax_scale=SCALE)
        out = attention(*(x[:, None] for x in (q, k, v)), packed_seq_params=row)
        expected = written_out(q, k, v, None, tree, window)
        torch.testing.assert_close(out, expected.flatten(1)[:, None], rtol=0, atol=1e-12)
    apart = PackedRow.from_lengths([len(q)], torch.device("cpu"), "thd")
    assert attention(q, k, v, packed_seq_params=apart) is q


def test_whole_blocks_need_no_mask() -> None:
    mask = long_tree().block_mask()
    assert mask.full_kv_num_blocks is not None and mask.full_kv_num_blocks.sum() > 0


def test_gradients_of_repeated_entries_have_the_same_bits_each_time() -> None:
    """Brackets instead of `index_select` fail here: two threads add 2,000 gradients to each entry in any order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.manual_seed(0)
        x, index = torch.randn(40, 256, requires_grad=True), torch.randint(20, (40_000,))
        gradient = torch.randn(40_000, 256)
        first, *others = (torch.autograd.grad(gather_entries(x, index), x, gradient)[0] for _ in range(6))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(first, other) for other in others)
    expected = torch.zeros(40, 256, dtype=torch.float64).index_add_(0, index, gradient.double())
    torch.testing.assert_close(first.double(), expected, rtol=0, atol=1e-3)
    y = torch.arange(6.0).view(2, 3)
    assert gather_entries(y, torch.tensor([2, 0, 2]), dim=1).tolist() == [[2, 0, 2], [5, 3, 5]]
