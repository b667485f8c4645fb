"""Attention in the engine's arithmetic: vLLM's kernel in the forward pass, torch's in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megarl.models.attention import AttentionPart, PackedAttention, PackedRow
from megarl.models.exact.rotary import RotaryTable
from megarl.platform.exact import attention


class ExactAttention(PackedAttention):
    """Core attention for packed rows with the engine's rounding. It also rotates queries and keys.

    Set `rotary` before the first pass; Megatron must not rotate them too.
    """

    rotary: RotaryTable

    def forward(self, query: Tensor, key: Tensor, *values: Any, packed_seq_params: PackedRow, **named: Any) -> Tensor:
        """Rotate queries and keys, then attend within each sequence.

        Shapes: query [tokens, 1, heads, head_dim], key and value [tokens, 1, groups, head_dim]; returns [tokens, 1,
        heads * head_dim].
        """
        positions = packed_seq_params.positions
        assert positions is not None
        query, key = (self.rotary.rotate(x.flatten(0, -3), positions).view_as(x) for x in (query, key))
        return super().forward(query, key, *values, packed_seq_params=packed_seq_params, **named)

    def _attend_padded(self, q: Tensor, k: Tensor, v: Tensor, part: AttentionPart) -> Tensor:
        """Attend with the engine's kernel. The gradient is that of the trainer's kernel."""

        def attend_like_engine(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            lengths = part.num_queries, part.num_keys
            return attention.attend(q, k, v, *lengths, scale=self.scale, window=self.window)

        def attend_like_trainer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return PackedAttention._attend_padded(self, q, k, v, part)

        return _TwoKernels.apply(q, k, v, attend_like_engine, attend_like_trainer)


class _TwoKernels(torch.autograd.Function):
    """Attention with two kernels. The engine's computes the output; the trainer's computes the gradient.

    The engine's kernel has no backward pass. So the trainer's kernel computes attention again in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        engine_kernel: Callable[[Tensor, Tensor, Tensor], Tensor],
        trainer_kernel: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.trainer_kernel = trainer_kernel
        return engine_kernel(q, k, v)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.trainer_kernel(*inputs)
        return *torch.autograd.grad(out, inputs, grads[0]), None, None
