"""Log-probs and entropies from hidden states, over a vocabulary split across ranks, without full logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Support(NamedTuple):
    """For each token, the token ids that sampling could choose, the target among them.

    `token_ids` is int [sum of counts], `counts` int [tokens]. Count 0: the whole vocabulary.
    """

    token_ids: Tensor
    counts: Tensor


def vocab_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    first_token_id: int,
    group: dist.ProcessGroup | None,
    temperature: float | Tensor,
    chunk_tokens: int,
    support: Support | None = None,
    keeps_logits: bool = False,
    function: type[VocabParallelLogprobs] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each target, and the entropy of its distribution.

    The distribution is softmax(hidden @ weight.T / temperature). `temperature` is one for all, or float32 [tokens].
    With `support`, only the tokens of each set have probability and gradient.

    Shapes: hidden [tokens, hidden_size]; weight [local_vocabulary, hidden_size], rows without padding, starting at
    token `first_token_id`; targets [tokens], global ids. Returns two [tokens], in nats, equal on all ranks of `group`:
    float32, or float64 if `hidden` is. A rank's gradient of `hidden` is partial: the caller's tensor-parallel mapping
    all-reduces it. A detached entropy and a frozen weight cost nothing in the backward pass.

    At most `chunk_tokens` * local_vocabulary logits exist at once. With `keeps_logits`, all logits stay for the
    backward pass: three matrix products of the head instead of four, and a single block for GPU kernels. A `function`
    with other rounding may gather the logits of whole tokens, and stores none.
    """
    # Checked here, because an autograd function's `forward` always runs without gradients.
    keeps_logits &= torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return (function or VocabParallelLogprobs).apply(
        hidden, weight, targets, first_token_id, group, temperature, chunk_tokens, support, keeps_logits
    )


class VocabParallelLogprobs(torch.autograd.Function):
    """Log-probs and entropies, computed in chunks of the vocabulary instead of tokens.

    Each row of the weight's gradient is then one matrix product, accumulated in full precision and written once. Chunks
    of tokens would need a float32 buffer for the whole gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        first_token_id: int,
        group: Any,
        temperature: float | Tensor,
        chunk: int,
        support: Support | None,
        keeps_logits: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the targets' log-probs and the entropies, [tokens] each.

        With `keeps_logits` all logits stay for the backward pass, else one block of the vocabulary at a time.
        """
        ctx.set_materialize_grads(False)
        local_targets = targets - first_token_id
        # Kernels make no copies of the logits, so blocks would save no memory.
        is_whole = keeps_logits and support is None and _has_kernels(hidden)
        blocks = vocabulary_blocks(len(targets), weight.size(0), len(targets) if is_whole else chunk)
        truncation = None if support is None else Truncation(support, first_token_id, blocks)
        wide_dtype = torch.promote_types(hidden.dtype, torch.float32)
        # Per block: the log of its sum of exponentials, and the entropy of the distribution within it.
        log_totals, entropies = torch.zeros(2, len(blocks), len(targets), dtype=wide_dtype, device=hidden.device)
        target_logit = torch.zeros_like(local_targets, dtype=wide_dtype)
        logit_memory = _allocate_logits(hidden, blocks, is_shared=not keeps_logits)
        kernels = _select_kernels(hidden, truncation)
        for index, block in enumerate(blocks):
            logits = _compute_logits(hidden, weight, block, temperature, logit_memory[index])
            columns, is_in_block = columns_of(local_targets, block)
            target_logit += logits.gather(1, columns[:, None]).squeeze(1) * is_in_block
            if truncation is not None:
                excluded = truncation.excluded_mask(index)
                log_totals[index], entropies[index] = _compute_truncated_statistics(logits, excluded)
            elif kernels is not None:
                kernels.block_statistics(logits, log_totals[index], entropies[index])
            else:
                _compute_block_statistics(logits, log_totals[index], entropies[index])
        logprob, log_total, entropy = _combine_blocks(
            target_logit, log_totals, entropies, group, is_truncated=truncation is not None
        )
        ctx.save_for_backward(hidden, weight, local_targets, log_total, entropy)
        ctx.settings = (temperature, blocks, truncation, _compute_logits)
        # An attribute instead of a saved tensor, because the backward pass overwrites it.
        ctx.saved_logits = logit_memory if keeps_logits else None
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of hidden states and head, from stored logits or logits computed again."""
        hidden, weight, local_targets, log_total, entropy = ctx.saved_tensors
        temperature, blocks, truncation, compute_logits = ctx.settings
        logprob_gradient, entropy_gradient = (None if grad is None else grad / temperature for grad in grads)
        logprob_gradient = torch.zeros_like(log_total) if logprob_gradient is None else logprob_gradient
        # d logprob / d logit = 1[target] - p;  d entropy / d logit = -p (log p + entropy).
        token_slopes = -logprob_gradient if entropy_gradient is None else -logprob_gradient - entropy_gradient * entropy
        gradients = HeadGradients(hidden, weight, ctx.needs_input_grad)
        # The backward pass overwrites the logits, so a second one computes them again.
        saved_logits, ctx.saved_logits = ctx.saved_logits, None
        logit_memory = saved_logits or _allocate_logits(hidden, blocks, is_shared=True)
        kernels = _select_kernels(hidden, truncation)
        for index, block in enumerate(blocks):
            block_memory = logit_memory[index]
            if saved_logits is None:
                logits = compute_logits(hidden, weight, block, temperature, block_memory)
            else:
                logits = block_memory.view(len(hidden), len(block))
            if kernels is not None:
                kernels.to_logit_gradients(
                    logits, log_total, token_slopes, entropy_gradient, local_targets - block.start, logprob_gradient
                )
                gradients.add_block(block, logits)
                continue
            grad_logits = _compute_logit_gradients(logits, log_total, token_slopes, entropy_gradient)
            if truncation is not None:
                grad_logits.masked_fill_(truncation.excluded_mask(index), 0.0)
            columns, is_in_block = columns_of(local_targets, block)
            grad_logits.scatter_add_(1, columns[:, None], (logprob_gradient * is_in_block)[:, None])
            if grad_logits.dtype != weight.dtype:
                # Round into the memory of the logits, which are no longer needed.
                rounded_gradient = block_memory[: grad_logits.numel()].view_as(grad_logits)
                grad_logits = rounded_gradient.copy_(grad_logits)
            gradients.add_block(block, grad_logits)
        return *gradients.collect(), *(None,) * 7


def _compute_logit_gradients(
    logits: Tensor, log_total: Tensor, token_slopes: Tensor, entropy_gradient: Tensor | None
) -> Tensor:
    """Return the gradients of a block's logits [tokens, block], without the part of the targets themselves.

    All other arguments are [tokens]. With p the probability, it is p * (slope - entropy_gradient * log p).
    """
    logprobs = logits.to(log_total.dtype).sub_(log_total[:, None])
    slope = token_slopes[:, None]
    if entropy_gradient is not None:
        slope = torch.addcmul(slope, logprobs, entropy_gradient[:, None], value=-1)
    return logprobs.exp_().mul_(slope)


def _compute_block_statistics(logits: Tensor, log_total: Tensor, entropy: Tensor) -> None:
    """Write a block's log-sum-exp and its entropy, like `logit_kernels.block_statistics`, with torch's operations."""
    largest = logits.amax(-1, keepdim=True).to(log_total.dtype)
    # torch's `sum` adds exponentials pairwise. Its `log_softmax` adds them one by one, with larger rounding errors.
    below_largest = logits - largest
    exponentials = below_largest.exp()
    total = exponentials.sum(-1)
    log_of_sum = total.log()
    torch.add(largest.squeeze(1), log_of_sum, out=log_total)
    torch.sub(log_of_sum, below_largest.mul_(exponentials).sum(-1) / total, out=entropy)


def _combine_blocks(
    target_logit: Tensor, log_totals: Tensor, entropies: Tensor, group: Any, *, is_truncated: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the targets' log-probs, the log-sum-exp and the entropy over all blocks of all ranks, [tokens] each.

    `log_totals` and `entropies` [blocks, tokens] are computed within each block.
    """
    largest_total = log_totals.logsumexp(0)
    all_reduce(largest_total, group, dist.ReduceOp.MAX)
    # Relative to the largest total of all ranks, no exponential overflows.
    shares = (log_totals - largest_total).exp()
    if is_truncated:
        log_totals = log_totals.where(shares > 0, largest_total)  # Avoids 0 * inf for blocks without tokens of a set.
    sums = torch.stack([target_logit, shares.sum(0), (shares * (entropies + largest_total - log_totals)).sum(0)])
    all_reduce(sums, group, dist.ReduceOp.SUM)
    target_logit, sum_of_shares, weighted_entropies = sums
    # The blocks' mean entropy, and the entropy of the choice of a block.
    log_total, entropy = largest_total + sum_of_shares.log(), weighted_entropies / sum_of_shares + sum_of_shares.log()
    return target_logit - log_total, log_total, entropy


def _select_kernels(hidden: Tensor, truncation: Truncation | None) -> Any:
    """Return the module of GPU kernels. None (use torch's operations): on a CPU, in float64, and for truncated sets."""
    if truncation is not None or not _has_kernels(hidden):
        return None
    # Only importable with a GPU build of torch.
    from megarl.models import logit_kernels

    return logit_kernels


def _has_kernels(hidden: Tensor) -> bool:
    return hidden.is_cuda and hidden.dtype != torch.float64


def _allocate_logits(hidden: Tensor, blocks: Sequence[range], *, is_shared: bool) -> list[Tensor]:
    """Return memory for the logits of each block, [tokens * block]. `is_shared`: all blocks use the same memory."""
    if is_shared:
        return [hidden.new_empty(len(hidden) * max(map(len, blocks), default=0))] * len(blocks)
    return list(hidden.new_empty(len(hidden) * sum(map(len, blocks))).split([len(hidden) * len(b) for b in blocks]))


class HeadGradients:
    """Gradients of the hidden states [tokens, hidden_size] and of the head's weight [local_vocabulary, hidden_size].

    `needs`: whether to compute each of the two, in this order.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, needs: Sequence[bool]) -> None:
        self._hidden, self._weight, self._needs_hidden = hidden, weight, needs[0]
        # Zero without blocks: a rank may have no rows of the vocabulary.
        self._hidden_gradient: Tensor | None = None
        self._weight_gradient = torch.empty_like(weight) if needs[1] else None

    def add_block(self, block: range, grad_logits: Tensor) -> None:
        """Add one vocabulary block's part of the two gradients. Call it once per block.

        `block`: its rows of the vocabulary. `grad_logits` [tokens, block]: gradient of its logits, in the weight's
        dtype.
        """
        rows = slice(block.start, block.stop)
        if self._needs_hidden:
            self._hidden_gradient = self._add_product(grad_logits, rows)
        if self._weight_gradient is not None:
            torch.mm(grad_logits.T, self._hidden, out=self._weight_gradient[rows])

    def _add_product(self, grad_logits: Tensor, rows: slice) -> Tensor:
        """Return the gradient of the hidden states plus a block's product. With several blocks it is float32."""
        weight, total = self._weight[rows], self._hidden_gradient
        if len(weight) == len(self._weight):
            return grad_logits @ weight
        if total is None:
            wide = torch.promote_types(self._hidden.dtype, torch.float32)
            total = torch.zeros_like(self._hidden, dtype=wide)
        if grad_logits.dtype == total.dtype:
            return total.addmm_(grad_logits, weight)
        if grad_logits.is_cuda:
            # The product's float32 sums are added to the total without rounding to the weight's dtype.
            return torch.addmm(total, grad_logits, weight, out_dtype=total.dtype, out=total)
        # torch 2.13 has no product with `out_dtype` on CPUs.
        return total.add_(grad_logits @ weight)

    def collect(self) -> tuple[Tensor | None, Tensor | None]:
        """Return both gradients [*shape], each in its tensor's dtype; None: not needed. Call it after the
        last block.
        """
        if not self._needs_hidden:
            return None, self._weight_gradient
        hidden_gradient = torch.zeros_like(self._hidden) if self._hidden_gradient is None else self._hidden_gradient
        return hidden_gradient.to(self._hidden.dtype), self._weight_gradient


class Truncation:
    """Masks of a block's vocabulary: for each token, the ids outside its set of `Support`, so without probability."""

    def __init__(self, support: Support, first_token_id: int, blocks: list[range]) -> None:
        """Store the sets `support`.

        This rank's vocabulary part starts at `first_token_id` and is cut into `blocks`.
        """
        self._blocks = blocks
        self._has_set = support.counts > 0
        self._columns = support.token_ids.long() - first_token_id
        tokens = torch.arange(len(support.counts), device=support.counts.device)
        # As the size of the result is known, the host does not wait for the counts.
        self._tokens = tokens.repeat_interleave(support.counts.long(), output_size=len(self._columns))

    def excluded_mask(self, index: int) -> Tensor:
        """Return bool [tokens, block], the mask of block `index`: True for ids outside a token's set.

        A token without a set has only False.
        """
        block = self._blocks[index]
        columns = self._columns - block.start
        # Ids of other blocks go to an extra column. Selecting this block's ids would make the host wait.
        columns = torch.where((columns >= 0) & (columns < len(block)), columns, len(block))
        is_excluded = self._has_set[:, None].repeat(1, len(block) + 1)
        is_excluded.index_put_((self._tokens, columns), is_excluded.new_zeros(()))
        return is_excluded[:, :-1]


def _compute_truncated_statistics(logits: Tensor, is_excluded: Tensor) -> tuple[Tensor, Tensor]:
    """Return a block's log-sum-exp and the entropy within the block, [tokens] each, without the excluded logits.

    If all logits of a token are excluded, they are minus infinity and 0. `logits` (overwritten) and `is_excluded` are
    [tokens, block].
    """
    logits.masked_fill_(is_excluded, -torch.inf)
    largest = logits.amax(-1, keepdim=True)
    largest = largest.to(torch.promote_types(largest.dtype, torch.float32))
    # If all are excluded, the largest is -inf, and -inf - -inf would be NaN.
    below_largest = logits - largest.masked_fill(largest == -torch.inf, 0.0)
    exponentials = below_largest.exp()
    total = exponentials.sum(-1)
    # With p = exp(below_largest) / total, the entropy -sum(p * log p) is log(total) - sum(p * below_largest). Excluded
    # logits are set to 0 in the sum, because 0 * -inf would be NaN.
    weighted_sum = below_largest.masked_fill_(is_excluded, 0.0).mul_(exponentials).sum(-1)
    entropy = torch.where(total > 0, total.log() - weighted_sum / total, 0.0)
    return largest.squeeze(1) + total.log(), entropy


def vocabulary_blocks(num_tokens: int, vocabulary: int, chunk: int) -> list[range]:
    """Return equal ranges of the vocabulary (the last may be shorter), with num_tokens * length <= chunk *
    vocabulary.
    """
    size = max(1, min(vocabulary, vocabulary * chunk // max(num_tokens, 1)))
    # Matrix products on a GPU are faster if rows of logits begin at multiples of 128 bytes: 64 bfloat16 elements.
    size -= size % 64 if 64 < size < vocabulary else 0
    return [range(start, min(start + size, vocabulary)) for start in range(0, vocabulary, size)]


def _compute_logits(
    hidden: Tensor, weight: Tensor, block: range, temperature: float | Tensor, logit_memory: Tensor
) -> Tensor:
    logits = logit_memory[: len(hidden) * len(block)].view(len(hidden), len(block))
    rows = weight[block.start : block.stop].T
    if isinstance(temperature, Tensor):
        return logits.addmm_(hidden, rows, beta=0).div_(temperature[:, None])
    return logits.addmm_(hidden, rows, beta=0, alpha=1 / temperature)


def columns_of(local_ids: Tensor, block: range) -> tuple[Tensor, Tensor]:
    """Return the column of each target in a block's logits, and whether the block contains it, both [tokens, ...].

    `local_ids` int64 [tokens, ...]: indices into this rank's vocabulary. Targets in other blocks get any valid column.
    """
    columns = local_ids - block.start
    return columns.clamp(0, len(block) - 1), (columns >= 0) & (columns < len(block))


def all_reduce(x: Tensor, group: dist.ProcessGroup | None, operation: dist.ReduceOp.RedOpType) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(x, operation, group=group)
