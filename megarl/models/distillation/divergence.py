"""Comparison of two models' distributions over a vocabulary split across ranks, block by block, without full logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.logprobs import HeadGradients, all_reduce, columns_of, vocabulary_blocks

DivergenceFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A divergence of `algorithms.divergences` with its keyword arguments set."""
_BLOCK_SHARE = 3
"""Memory of a vocabulary block, in multiples of one model's log-probs: both models' log-probs and the result."""


def vocab_parallel_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    divergence: DivergenceFunction,
    *,
    group: dist.ProcessGroup | None,
    temperature: float,
    chunk_tokens: int,
) -> Tensor:
    """Return the divergence of the policy's and the teacher's distributions: float32 [tokens], in nats.

    A distribution is softmax(hidden @ weight.T / temperature), with the model's own hidden states. Shapes: hidden
    [tokens, hidden_size]; weight [local_vocabulary, hidden_size], rows without padding; teacher_hidden [tokens,
    teacher's hidden_size]; teacher_weight [local_vocabulary, teacher's hidden_size], the rows of the same tokens. The
    result is equal on all ranks of `group`.

    Forward and backward need about the memory of log-probs with these `chunk_tokens`. Gradient flows to hidden and
    weight. A rank's gradient of `hidden` is partial; the caller's tensor-parallel mapping all-reduces it.
    """
    return _VocabParallelDivergence.apply(
        hidden, weight, teacher_hidden, teacher_weight, divergence, group, temperature, chunk_tokens
    )


class _VocabParallelDivergence(torch.autograd.Function):
    """Three passes over the vocabulary: normalisers of both models, sums over probabilities, and the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        divergence: DivergenceFunction,
        group: Any,
        temperature: float,
        chunk: int,
    ) -> Tensor:
        """Sum the divergence's terms over blocks of the vocabulary: float32 [tokens], on all ranks of `group`."""
        blocks = vocabulary_blocks(_BLOCK_SHARE * len(hidden), len(weight), chunk)
        hidden_and_heads = (hidden, weight), (teacher_hidden, teacher_weight)
        log_totals = [_compute_log_totals(*model, blocks, temperature, group) for model in hidden_and_heads]
        term_and_slope_sums = torch.zeros(2, len(hidden), dtype=torch.float32, device=hidden.device)
        for block in blocks:
            logprobs = [
                _compute_logits(*model, block, temperature).sub_(log_total[:, None])
                for model, log_total in zip(hidden_and_heads, log_totals, strict=True)
            ]
            terms, slopes = divergence(*logprobs)
            term_and_slope_sums += torch.stack([terms.sum(-1), slopes.sum(-1)])
        all_reduce(term_and_slope_sums, group, dist.ReduceOp.SUM)
        divergence_sum, slope_sum = term_and_slope_sums
        # The backward pass computes the logits again: only [tokens] vectors are stored.
        ctx.save_for_backward(hidden, weight, teacher_hidden, teacher_weight, *log_totals, slope_sum)
        ctx.settings = divergence, temperature, blocks
        return divergence_sum

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Return the gradients of the policy's hidden states and head, computing the logits again."""
        hidden, weight, teacher_hidden, teacher_weight, log_total, teacher_log_total, slope_sum = ctx.saved_tensors
        divergence, temperature, blocks = ctx.settings
        [grad] = grads
        scaled_grad = (grad / temperature)[:, None]
        gradients = HeadGradients(hidden, weight, ctx.needs_input_grad)
        for block in blocks:
            logprobs = _compute_logits(hidden, weight, block, temperature).sub_(log_total[:, None])
            teacher_logprobs = _compute_logits(teacher_hidden, teacher_weight, block, temperature).sub_(
                teacher_log_total[:, None]
            )
            _, slopes = divergence(logprobs, teacher_logprobs)
            grad_logits = (
                torch.addcmul(slopes, logprobs.exp_(), slope_sum[:, None], value=-1).mul_(scaled_grad).to(weight.dtype)
            )
            gradients.add_block(block, grad_logits)
        return *gradients.collect(), *(None,) * 6


def vocab_parallel_k_logprobs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    *,
    first_token_id: int,
    group: dist.ProcessGroup | None,
    temperature: float,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Return the log-probs of k tokens at each position, and the joint log-prob of the remaining vocabulary.

    The distribution is softmax(hidden @ weight.T / temperature). The joint log-prob is summed over the remaining
    tokens: one minus the sum of the k would lose all digits if the k have nearly all probability.

    Shapes: hidden [tokens, hidden_size]; weight [local_vocabulary, hidden_size], rows without padding, starting at
    token `first_token_id`; token_ids int64 [tokens, k], global ids, distinct at each position. Returns float32 [tokens,
    k] and [tokens], in nats, equal on all ranks of `group`; the second is minus infinity if no token remains. At most
    `chunk_tokens` * local_vocabulary logits exist at once. Gradients as in `vocab_parallel_divergence`.
    """
    return _VocabParallelKLogprobs.apply(hidden, weight, token_ids, first_token_id, group, temperature, chunk_tokens)


class _VocabParallelKLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        token_ids: Tensor,
        first_token_id: int,
        group: Any,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probs [tokens, k] of `token_ids`, and the joint log-prob [tokens] of all others."""
        blocks = vocabulary_blocks(len(hidden), len(weight), chunk)
        local_ids = token_ids - first_token_id
        token_logits = torch.zeros_like(local_ids, dtype=torch.float32)
        block_totals = _make_block_totals(hidden, blocks)
        for index, block in enumerate(blocks):
            columns, is_in_block = columns_of(local_ids, block)
            logits = _compute_logits(hidden, weight, block, temperature)
            token_logits += logits.gather(1, columns) * is_in_block
            block_totals[index] = _exclude_columns(logits, columns, is_in_block).logsumexp(-1)
        all_reduce(token_logits, group, dist.ReduceOp.SUM)
        others_log_total = _reduce_log_total(block_totals, group)
        log_total = torch.logaddexp(token_logits.logsumexp(-1), others_log_total)
        logprobs, others_logprob = token_logits - log_total[:, None], others_log_total - log_total
        ctx.save_for_backward(hidden, weight, local_ids, logprobs, others_log_total, others_logprob)
        ctx.settings = temperature, blocks
        return logprobs, others_logprob

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Return the gradients of hidden states and head, computing the logits again."""
        hidden, weight, local_ids, logprobs, others_log_total, others_logprob = ctx.saved_tensors
        temperature, blocks = ctx.settings
        chosen_gradient, others_gradient = (grad / temperature for grad in grads)
        gradient_sum = -chosen_gradient.sum(-1) - others_gradient
        # With p the probabilities, a requested token's gradient is chosen_gradient + gradient_sum * p. The remaining
        # tokens share the gradient of their joint log-prob by their probabilities.
        chosen_gradient = chosen_gradient + logprobs.exp() * gradient_sum[:, None]
        others_gradient = others_gradient + others_logprob.exp() * gradient_sum
        others_log_total = others_log_total.masked_fill(others_log_total == -torch.inf, 0.0)
        gradients = HeadGradients(hidden, weight, ctx.needs_input_grad)
        for block in blocks:
            columns, is_in_block = columns_of(local_ids, block)
            logits = _exclude_columns(_compute_logits(hidden, weight, block, temperature), columns, is_in_block)
            grad_logits = logits.sub_(others_log_total[:, None]).exp_().mul_(others_gradient[:, None])
            grad_logits = grad_logits.scatter_add_(1, columns, chosen_gradient * is_in_block).to(weight.dtype)
            gradients.add_block(block, grad_logits)
        return *gradients.collect(), *(None,) * 5


@torch.no_grad()
def vocab_parallel_top_k(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    first_token_id: int,
    group: dist.ProcessGroup | None,
    temperature: float,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k most likely tokens at each position, their log-probs, and the remaining vocabulary's joint log-prob.

    The most likely token comes first. Shapes as in `vocab_parallel_k_logprobs`; returns int64 and float32 [tokens, k]
    and float32 [tokens], without gradient. All ranks choose the same among equally likely tokens.
    """
    blocks = vocabulary_blocks(len(hidden), len(weight), chunk_tokens)
    logits = hidden.new_full((len(hidden), k), -torch.inf, dtype=torch.float32)
    token_ids = torch.zeros_like(logits, dtype=torch.int64)
    others_log_total = logits.new_full((len(hidden),), -torch.inf)
    for block in blocks:
        block_logits = _compute_logits(hidden, weight, block, temperature)
        block_top_logits, block_columns = block_logits.topk(min(k, len(block)), dim=-1)
        block_total = block_logits.scatter_(-1, block_columns, -torch.inf).logsumexp(-1)
        candidates = (logits, token_ids), (block_top_logits, block_columns + block.start + first_token_id)
        logits, token_ids, remaining_total = _select_top_k(candidates, k)
        others_log_total = torch.logaddexp(others_log_total, torch.logaddexp(block_total, remaining_total))
    others_log_total = _reduce_log_total(others_log_total[None], group)
    # Each rank has the best tokens of its part of the vocabulary. Choose the best of all ranks.
    if group is not None and group.size() > 1:
        gathered = [[torch.empty_like(tensor) for _ in range(group.size())] for tensor in (logits, token_ids)]
        dist.all_gather(gathered[0], logits, group=group)
        dist.all_gather(gathered[1], token_ids, group=group)
        logits, token_ids, remaining_total = _select_top_k(list(zip(*gathered, strict=True)), k)
        others_log_total = torch.logaddexp(others_log_total, remaining_total)
    log_total = torch.logaddexp(logits.logsumexp(-1), others_log_total)
    return token_ids, logits - log_total[:, None], others_log_total - log_total


def _select_top_k(candidates: Sequence[tuple[Tensor, Tensor]], k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k largest logits [tokens, k] of all parts, their token ids, and the log total [tokens] of all
    others.
    """
    logits, token_ids = (torch.cat(list(tensors), -1) for tensors in zip(*candidates, strict=True))
    logits, ranking = logits.sort(dim=-1, descending=True)
    return logits[:, :k].contiguous(), token_ids.gather(-1, ranking[:, :k]), logits[:, k:].logsumexp(-1)


def _exclude_columns(logits: Tensor, columns: Tensor, is_in_block: Tensor) -> Tensor:
    """Set the columns [tokens, k] of the local logits to minus infinity, in place. Returns the logits."""
    # Add minus infinity instead of assigning it: tokens of other ranks have clamped columns and must change nothing.
    return logits.scatter_add_(
        1, columns, torch.zeros_like(columns, dtype=torch.float32).masked_fill(is_in_block, -torch.inf)
    )


def _compute_log_totals(hidden: Tensor, weight: Tensor, blocks: list[range], temperature: float, group: Any) -> Tensor:
    """Return the log of the sum of exponentials of all logits (the normaliser), float32 [tokens]."""
    block_totals = _make_block_totals(hidden, blocks)
    for index, block in enumerate(blocks):
        block_totals[index] = _compute_logits(hidden, weight, block, temperature).logsumexp(-1)
    return _reduce_log_total(block_totals, group)


def _make_block_totals(hidden: Tensor, blocks: list[range]) -> Tensor:
    return hidden.new_full((max(len(blocks), 1), len(hidden)), -torch.inf, dtype=torch.float32)


def _reduce_log_total(block_totals: Tensor, group: Any) -> Tensor:
    """Return the log of the sum of exponentials [tokens] over `block_totals` [blocks, tokens] of all ranks."""
    rank_total = block_totals.logsumexp(0)
    largest = rank_total.clone()
    all_reduce(largest, group, dist.ReduceOp.MAX)
    # Minus infinity minus itself would be NaN.
    largest.masked_fill_(largest == -torch.inf, 0.0)
    total = (rank_total - largest).exp()
    all_reduce(total, group, dist.ReduceOp.SUM)
    return largest + total.log()


def _compute_logits(hidden: Tensor, weight: Tensor, block: range, temperature: float) -> Tensor:
    """Return the logits of a block of the vocabulary, float32 [tokens, block]. The product is in the model's dtype."""
    return (hidden @ weight[block.start : block.stop].T).float().div_(temperature)
