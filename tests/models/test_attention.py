"""Packed rows, and attention over them against one plain attention per sequence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.models.attention import PackedAttention, PackedRow

CPU = torch.device("cpu")


def test_packed_row() -> None:
    row = PackedRow.from_lengths([3, 1, 4], CPU, "packed")
    assert row.cu_seqlens_q.tolist() == row.cu_seqlens_kv_padded.tolist() == [0, 3, 4, 8]
    assert row.cu_seqlens_q.dtype == torch.int32
    assert (row.max_seqlen_q, row.max_seqlen_kv, row.qkv_format) == (4, 4, "packed")
    assert row.positions is not None and row.positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    (part,) = row.parts
    assert part.queries is None and part.keys is None and part.cu_keys.tolist() == [0, 3, 4, 8]


def attend_each(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scale: float) -> torch.Tensor:
    """Softmax attention written out, sequence by sequence, in float64; heads repeated for their group."""
    out = []
    for queries, keys, values in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        repeats = q.size(1) // k.size(1)
        keys, values = (x.repeat_interleave(repeats, dim=1).double() for x in (keys, values))
        scores = torch.einsum("ihd,jhd->hij", queries.double(), keys) * scale
        future = torch.ones(len(queries), len(queries), dtype=torch.bool).triu(1)
        out.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(future, -torch.inf).softmax(-1), values))
    return torch.cat(out)


@pytest.mark.parametrize(("heads", "groups"), [pytest.param(4, 4, id="all heads"), pytest.param(4, 2, id="grouped")])
@pytest.mark.parametrize("scale", [pytest.param(None, id="usual scale"), pytest.param(0.7, id="own scale")])
def test_each_sequence_attends_to_itself(heads: int, groups: int, scale: float | None) -> None:
    lengths, width = [5, 1, 8, 2], 8
    torch.manual_seed(1)
    q, k, v = (torch.randn(16, 1, n, width, requires_grad=True) for n in (heads, groups, groups))
    config: Any = SimpleNamespace(kv_channels=width)
    attention = PackedAttention(config=config, softmax_scale=scale)
    out = attention(q, k, v, None, packed_seq_params=PackedRow.from_lengths(lengths, CPU, "packed"))
    expected = attend_each(q.squeeze(1), k.squeeze(1), v.squeeze(1), lengths, scale or width**-0.5)
    torch.testing.assert_close(out.double(), expected.reshape(16, 1, heads * width), rtol=0, atol=1e-6)
    direction = torch.randn_like(out)
    ours = torch.autograd.grad(out, (q, k, v), direction)
    theirs = torch.autograd.grad(expected, (q, k, v), direction.double().view_as(expected))
    for got, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
