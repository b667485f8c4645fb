"""Vocab-parallel, chunked comparison of two models' distributions: the full logits of either are never in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.logprobs import all_reduce, vocabulary_blocks

Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function of `algorithms.divergences`, its keywords bound."""


def vocab_parallel_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    divergence: Divergence,
    *,
    group: dist.ProcessGroup | None,
    temperature: float,
    chunk_tokens: int,
) -> Tensor:
    """Divergence of the policy's distribution softmax(hidden @ weight.T / temperature) and the teacher's likewise.

    Shapes: hidden [tokens, hidden_size]; weight [local_vocabulary, hidden_size], rows without padding; teacher_hidden
    [tokens, teacher's hidden_size]; teacher_weight [local_vocabulary, teacher's hidden_size], the rows of the same
    tokens. Returns float32 [tokens], in nats, equal on all ranks of `group`. Forward and backward hold at most
    `chunk_tokens` * local_vocabulary logits of each model at once. Gradient flows to hidden and weight; that of
    `hidden` is partial: the caller's tensor-parallel mapping all-reduces it.
    """
    return _VocabParallelDivergence.apply(
        hidden, weight, teacher_hidden, teacher_weight, divergence, group, temperature, chunk_tokens
    )


class _VocabParallelDivergence(torch.autograd.Function):
    """Three passes over the vocabulary: both models' log totals, the sums over probabilities, and the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        divergence: Divergence,
        group: Any,
        temperature: float,
        chunk: int,
    ) -> Tensor:
        blocks = vocabulary_blocks(len(hidden), len(weight), chunk)
        pairs = (hidden, weight), (teacher_hidden, teacher_weight)
        log_totals = [_log_totals(*pair, blocks, temperature, group) for pair in pairs]
        sums = torch.zeros(2, len(hidden), dtype=torch.float32, device=hidden.device)
        for block in blocks:
            logprobs = [
                _logits(*pair, block, temperature).sub_(log_total[:, None])
                for pair, log_total in zip(pairs, log_totals, strict=True)
            ]
            terms, slopes = divergence(*logprobs)
            sums += torch.stack([terms.sum(-1), slopes.sum(-1)])
        all_reduce(sums, group, dist.ReduceOp.SUM)
        ctx.save_for_backward(hidden, weight, teacher_hidden, teacher_weight, *log_totals, sums[1])
        ctx.settings = divergence, temperature, blocks
        return sums[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        hidden, weight, teacher_hidden, teacher_weight, log_total, teacher_log_total, slope = ctx.saved_tensors
        divergence, temperature, blocks = ctx.settings
        [grad] = grads
        scale = (grad / temperature)[:, None]
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if for_hidden else None
        grad_weight = torch.empty_like(weight) if for_weight else None
        for block in blocks:
            logprobs = _logits(hidden, weight, block, temperature).sub_(log_total[:, None])
            of_teacher = _logits(teacher_hidden, teacher_weight, block, temperature).sub_(teacher_log_total[:, None])
            _, slopes = divergence(logprobs, of_teacher)
            grad_logits = torch.addcmul(slopes, logprobs.exp_(), slope[:, None], value=-1).mul_(scale).to(weight.dtype)
            rows = slice(block.start, block.stop)
            if grad_hidden is not None:
                grad_hidden += grad_logits @ weight[rows]
            if grad_weight is not None:
                torch.mm(grad_logits.T, hidden, out=grad_weight[rows])
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, *(None,) * 6


def vocab_parallel_gathered(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    *,
    first_token_id: int,
    group: dist.ProcessGroup | None,
    temperature: float,
    chunk_tokens: int,
) -> Tensor:
    """Log-probs of several tokens at each position under softmax(hidden @ weight.T / temperature).

    Shapes: hidden [tokens, hidden_size]; weight [local_vocabulary, hidden_size], rows without padding, the first of
    them being token `first_token_id`; token_ids int64 [tokens, k], global ids, those of a position differ. Returns
    float32 [tokens, k], in nats, equal on all ranks of `group`. Memory and gradients as of `vocab_parallel_divergence`.
    """
    return _VocabParallelGathered.apply(hidden, weight, token_ids, first_token_id, group, temperature, chunk_tokens)


class _VocabParallelGathered(torch.autograd.Function):
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
    ) -> Tensor:
        blocks = vocabulary_blocks(len(hidden), len(weight), chunk)
        local = token_ids - first_token_id
        log_total = _log_totals(hidden, weight, blocks, temperature, group)
        chosen = torch.zeros_like(local, dtype=torch.float32)
        for block in blocks:
            columns, is_here = _columns(local, block)
            chosen += _logits(hidden, weight, block, temperature).gather(1, columns) * is_here
        all_reduce(chosen, group, dist.ReduceOp.SUM)
        ctx.save_for_backward(hidden, weight, local, log_total)
        ctx.settings = temperature, blocks
        return chosen - log_total[:, None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        hidden, weight, local, log_total = ctx.saved_tensors
        temperature, blocks = ctx.settings
        scaled = grads[0] / temperature
        whole = -scaled.sum(-1, keepdim=True)
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if for_hidden else None
        grad_weight = torch.empty_like(weight) if for_weight else None
        for block in blocks:
            probabilities = _logits(hidden, weight, block, temperature).sub_(log_total[:, None]).exp_()
            columns, is_here = _columns(local, block)
            grad_logits = probabilities.mul_(whole).scatter_add_(1, columns, scaled * is_here).to(weight.dtype)
            rows = slice(block.start, block.stop)
            if grad_hidden is not None:
                grad_hidden += grad_logits @ weight[rows]
            if grad_weight is not None:
                torch.mm(grad_logits.T, hidden, out=grad_weight[rows])
        return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, *(None,) * 5


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
) -> tuple[Tensor, Tensor]:
    """The k most likely tokens at each position and their log-probs, the most likely first.

    Shapes as of `vocab_parallel_gathered`; int64 and float32 [tokens, k], without gradient. Of equally likely tokens
    any may be taken, the same on all ranks.
    """
    blocks = vocabulary_blocks(len(hidden), len(weight), chunk_tokens)
    log_total = _log_totals(hidden, weight, blocks, temperature, group)
    logits = hidden.new_full((len(hidden), k), -torch.inf, dtype=torch.float32)
    token_ids = torch.zeros_like(logits, dtype=torch.int64)
    for block in blocks:
        found = _logits(hidden, weight, block, temperature)
        ids = torch.arange(block.start, block.stop, device=hidden.device) + first_token_id
        logits, token_ids = _best([(logits, token_ids), (found, ids.expand_as(found))], k)
    if group is not None and group.size() > 1:
        of_ranks = [[torch.empty_like(part) for _ in range(group.size())] for part in (logits, token_ids)]
        dist.all_gather(of_ranks[0], logits, group=group)
        dist.all_gather(of_ranks[1], token_ids, group=group)
        logits, token_ids = _best(list(zip(*of_ranks, strict=True)), k)
    return token_ids, logits - log_total[:, None]


def _best(parts: Sequence[tuple[Tensor, Tensor]], k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits [tokens, k] of all parts, and their tokens."""
    logits, token_ids = (torch.cat(list(part), -1) for part in zip(*parts, strict=True))
    largest, places = logits.topk(k, dim=-1)
    return largest, token_ids.gather(-1, places)


def _log_totals(hidden: Tensor, weight: Tensor, blocks: list[range], temperature: float, group: Any) -> Tensor:
    """The logarithm of the sum of exponentials of all logits, float32 [tokens]."""
    parts = hidden.new_full((max(len(blocks), 1), len(hidden)), -torch.inf, dtype=torch.float32)
    for index, block in enumerate(blocks):
        parts[index] = _logits(hidden, weight, block, temperature).logsumexp(-1)
    own = parts.logsumexp(0)
    largest = own.clone()
    all_reduce(largest, group, dist.ReduceOp.MAX)
    total = (own - largest).exp()
    all_reduce(total, group, dist.ReduceOp.SUM)
    return largest + total.log()


def _logits(hidden: Tensor, weight: Tensor, block: range, temperature: float) -> Tensor:
    """Logits of a block, float32 [tokens, block]: as exact as the product of the models' type is."""
    return (hidden @ weight[block.start : block.stop].T).float().div_(temperature)


def _columns(local: Tensor, block: range) -> tuple[Tensor, Tensor]:
    """Column of each token in a block's logits, any valid one where another block has it, and whether it is here."""
    columns = local - block.start
    return columns.clamp(0, len(block) - 1), (columns >= 0) & (columns < len(block))
