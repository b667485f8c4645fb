"""Log-probs and entropy of given tokens from hidden states, without ever holding the logits of a row."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def vocab_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    first_token_id: int,
    group: dist.ProcessGroup | None,
    temperature: float,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target under softmax(hidden @ weight.T / temperature), and that distribution's entropy.

    Shapes: hidden [tokens, hidden_size]; weight [local_vocabulary, hidden_size], rows without padding, the first of
    them being token `first_token_id`; targets [tokens] global ids. Returns two float32 [tokens], equal on all ranks
    of `group`. Logits of `chunk_tokens` tokens are alive at once, forward and backward. The gradient of `hidden` is
    this rank's part: the caller's tensor-parallel mapping sums it.
    """
    return _VocabParallelLogprobs.apply(hidden, weight, targets, first_token_id, group, temperature, chunk_tokens)  # type: ignore[return-value]


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        first_token_id: int,
        group: Any,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        # Rows of the result: the target's logit, the sum of exponentials, the mean logit; each summed over ranks.
        target_logit, total, mean_logit = torch.zeros(3, len(targets), dtype=torch.float32, device=hidden.device)
        top = torch.empty_like(total)
        for part in _chunks(len(targets), chunk):
            logits = _logits(hidden[part], weight, temperature)
            top[part] = logits.max(dim=-1).values if weight.size(0) else -torch.inf
            _all_reduce(top[part], group, dist.ReduceOp.MAX)
            local, is_local = _local_targets(targets[part], first_token_id, weight.size(0))
            target_logit[part] = _pick(logits, local) * is_local
            exponentials = (logits - top[part, None]).exp()
            total[part] = exponentials.sum(-1)
            mean_logit[part] = (exponentials * logits).sum(-1)
        sums = torch.stack([target_logit, total, mean_logit])
        _all_reduce(sums, group, dist.ReduceOp.SUM)
        target_logit, total, mean_logit = sums
        log_total = top + total.log()
        mean_logit = mean_logit / total
        ctx.save_for_backward(hidden, weight, targets, log_total, mean_logit)
        ctx.settings = (first_token_id, temperature, chunk)
        return target_logit - log_total, log_total - mean_logit

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad_logprob, grad_entropy = grads
        hidden, weight, targets, log_total, mean_logit = ctx.saved_tensors
        first_token_id, temperature, chunk = ctx.settings
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for part in _chunks(len(targets), chunk):
            logits = _logits(hidden[part], weight, temperature)
            probabilities = (logits - log_total[part, None]).exp()
            # d logprob / d logit = 1[target] - p;  d entropy / d logit = -p (logit - mean logit).
            slope = grad_logprob[part, None] + grad_entropy[part, None] * (logits - mean_logit[part, None])
            grad_logits = -probabilities * slope
            local, is_local = _local_targets(targets[part], first_token_id, weight.size(0))
            if weight.size(0):
                grad_logits.scatter_add_(1, local[:, None], (grad_logprob[part] * is_local)[:, None])
            grad_logits = (grad_logits / temperature).to(weight.dtype)
            grad_hidden[part] = grad_logits @ weight
            grad_weight += grad_logits.T @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _chunks(tokens: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    return (hidden @ weight.T).float() / temperature


def _local_targets(targets: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Column of each target in this rank's logits (any valid one where it is not here), and whether it is here."""
    local = targets - first
    is_local = (local >= 0) & (local < size)
    return local.clamp(0, max(size - 1, 0)), is_local


def _pick(logits: Tensor, columns: Tensor) -> Tensor:
    return logits.gather(1, columns[:, None]).squeeze(1) if logits.size(1) else logits.new_zeros(len(columns))


def _all_reduce(x: Tensor, group: dist.ProcessGroup | None, operation: dist.ReduceOp.RedOpType) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(x, operation, group=group)
