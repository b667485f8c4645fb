"""Matrix products whose results depend neither on the number of rows nor on the number of ranks (`trainer.exact`).

An input's rows are padded to a multiple of EXACT_ROWS. At such sizes, other rows do not change a row's result. If
tensor-parallel ranks split a product, its inner dimension has a fixed total number of equal blocks. Each block's
product is rounded to the input's dtype. The rounded products are added in float32, pairwise along a fixed binary tree,
first within a rank, then over the ranks. So trainer and engine make the same additions, even with different numbers of
blocks per rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megarl.config.parallel import EXACT_ROWS


def row_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias, [rows, out], with each row rounded as in any other batch.

    Shapes: x [rows, in], weight [out, in], bias [out].
    """
    padding = -len(x) % EXACT_ROWS
    return F.linear(F.pad(x, (0, 0, 0, padding)) if padding else x, weight, bias)[: len(x)]


def block_product(x: Tensor, weight: Tensor, num_blocks: int) -> Tensor:
    """Return this rank's partial sum of a product x @ weight.T that is split over ranks: float32 [..., out].

    This rank's share of the inner dimension, `in`, is split into `num_blocks` equal blocks. Shapes: x [..., in], weight
    [out, in].
    """
    blocks = zip(x.flatten(0, -2).chunk(num_blocks, -1), weight.chunk(num_blocks, -1), strict=True)
    total = _tree_sum([row_product(x_block, weight_block).float() for x_block, weight_block in blocks])
    return total.view(*x.shape[:-1], len(weight))


def sum_over_ranks(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of all ranks' parts, float32 [..., out] each, along the tree; a collective over the group."""
    if group.size() == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return _tree_sum(parts)


def _tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum [*shape] of the parts [*shape]. Neighbours are added in pairs, then their sums, and so on."""
    level = list(parts)
    while len(level) > 1:
        pairs = [part + next_part for part, next_part in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]
