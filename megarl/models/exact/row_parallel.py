"""Row-parallel linear layers with sums that do not depend on the tensor-parallel size."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import RowParallelLinear
from torch import Tensor

from megarl.platform.exact.block_products import block_product, sum_over_ranks


class BlockRowParallelLinear(RowParallelLinear):
    """A row-parallel layer without bias. It adds its products in the engine's order
    (`platform.exact.block_products`).
    """

    num_blocks: int = 1
    """Blocks on this rank. Set it after construction."""

    def forward(self, input_: Tensor, weight: Tensor | None = None) -> tuple[Tensor, None]:
        """Return the sum of all ranks' outputs [tokens, 1, out] for this rank's input [tokens, 1, in].

        Under sequence parallelism the output has this rank's tokens only. If an expert's layer is split over
        ranks, its output is this rank's product, float32. `weight` [out, in] replaces the layer's own.
        """
        part = _BlockProduct.apply(input_, self.weight if weight is None else weight, self.num_blocks)
        group: Any = self.tp_group
        if self.is_expert:
            # The dispatcher later adds the products of all ranks.
            return (part if group.size() > 1 else part.to(input_.dtype)), None
        return _SumOverRanks.apply(part, group, self.sequence_parallel, input_.dtype), None


class _BlockProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, num_blocks: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        return block_product(x, weight, num_blocks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = grads[0].to(x.dtype)
        input_gradient = gradient @ weight if ctx.needs_input_grad[0] else None
        weight_gradient = gradient.flatten(0, -2).T @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return input_gradient, weight_gradient, None


class _SumOverRanks(torch.autograd.Function):
    """The sum of all ranks' tensors (`sum_over_ranks`), rounded to a dtype.

    Under sequence parallelism each rank receives the sum of its own tokens.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any, is_split: bool, dtype: torch.dtype) -> Tensor:
        ctx.group, ctx.is_split = group, is_split
        total = sum_over_ranks(part, group)
        if is_split:
            total = total.chunk(group.size())[group.rank()]
        return total.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Return the gradient of this rank's part, which is the gradient of the sum."""
        gradient = grads[0]
        if ctx.is_split:
            parts = [torch.empty_like(gradient) for _ in range(ctx.group.size())]
            torch.distributed.all_gather(parts, gradient.contiguous(), group=ctx.group)
            gradient = torch.cat(parts)
        # The gradient of a sum is the gradient of each part. autograd expects the part's dtype.
        return gradient.float(), None, None, None
