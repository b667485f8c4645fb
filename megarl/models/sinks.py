"""Attention with sinks, computed by kernels without sinks.

The kernels return lse, the log of each query's sum of exponentials. A sink adds exp(sink) to this sum. With lse' =
log(exp(lse) + exp(sink)), the output is the kernel's, times exp(lse - lse'). The backward pass of flash attention
(arXiv:2307.08691, algorithm 2) needs only the output and lse. From the output with sinks and lse' it computes the
gradients with sinks.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Kernel(Protocol):
    """Attention of packed sequences without sinks.

    Shapes: q and out [tokens, heads, head_dim], k and v [keys, groups, head_dim], lse [heads, tokens] in float32 or
    wider.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention's output [tokens, heads, head_dim] and lse [heads, tokens]."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v. `grad` [tokens, heads, head_dim] is the gradient of out."""
        ...


class FlashKernel(NamedTuple):
    """torch's variable-length flash kernel on CUDA. A query attends to the last `window` keys up to its own token; 0:
    to all.

    `lengths`: cumulative numbers of queries and of keys, int32 [sequences + 1] each, and the largest of both.
    """

    lengths: tuple[Tensor, Tensor, int, int]
    scale: float
    window: int

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        # After the lengths: dropout, whether the attention is causal, and no mask for debugging.
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *self.lengths, 0.0, self._is_causal, False, **self._options
        )
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Replaces the random generator's state, which the kernel does not read without dropout.
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
        return torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, *self.lengths, 0.0, self._is_causal, unused, unused, **self._options
        )

    @property
    def _is_causal(self) -> bool:
        # A window to the left and none to the right is already causal.
        return self.window == 0

    @property
    def _options(self) -> dict[str, Any]:
        return {"scale": self.scale, "window_size_left": self.window - 1, "window_size_right": 0}


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: Kernel) -> Tensor:
    """Return attention with a sink for each head, [tokens, heads, head_dim].

    Shapes: q [tokens, heads, head_dim], k and v [keys, groups, head_dim], sinks [heads].
    """
    return _SinkAttention.apply(q, k, v, sinks, kernel)


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: Kernel) -> Tensor:
        out, lse = kernel.forward(q, k, v)
        # A sink adds its exponential to the softmax's sum: this scales the kernel's output down.
        lse_with_sinks = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1))
        out = (out * (lse - lse_with_sinks).exp().T.unsqueeze(-1)).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse_with_sinks)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of q, k, v and the sinks."""
        q, k, v, sinks, out, lse_with_sinks = ctx.saved_tensors
        grad = grads[0].contiguous()
        input_gradients = ctx.kernel.backward(grad, q, k, v, out, lse_with_sinks)
        # A sink has no value: its score only takes weight from the keys.
        weight = (sinks.to(lse_with_sinks.dtype).unsqueeze(-1) - lse_with_sinks).exp()
        sink_gradient = -(weight * (grad.to(lse_with_sinks.dtype) * out).sum(-1).T).sum(-1)
        return *input_gradients, sink_gradient.to(sinks.dtype), None
