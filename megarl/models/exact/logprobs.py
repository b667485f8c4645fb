"""Log-probs and entropies in the engine's arithmetic: one `log_softmax` over the whole vocabulary of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megarl.models.logprobs import Support, Truncation, VocabParallelLogprobs, vocabulary_blocks
from megarl.platform.exact.block_products import row_product


class ExactLogprobs(VocabParallelLogprobs):
    """Log-probs and entropies with the engine's rounding, always float32. The gradient uses the same logits.

    A rank has at most `chunk` * local_vocabulary logits at once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        first_token_id: int,
        group: dist.ProcessGroup | None,
        temperature: float | Tensor,
        chunk: int,
        support: Support | None,
        keeps_logits: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the targets' log-probs and the entropies, [tokens] each, from logits gathered over all ranks."""
        ctx.set_materialize_grads(False)
        blocks = vocabulary_blocks(len(targets), weight.size(0), chunk)
        logprobs, log_totals, entropies = hidden.new_empty(3, len(targets), dtype=torch.float32)
        vocabulary_widths = _gather_vocabulary_widths(weight, group)
        # Each rank gets the logits of the whole vocabulary, so compute fewer tokens at once.
        tokens_at_once = max(1, chunk // len(vocabulary_widths))
        for start in range(0, len(targets), tokens_at_once):
            rows = slice(start, start + tokens_at_once)
            logits = _gather_vocabulary(row_product(hidden[rows], weight), vocabulary_widths, group).float()
            logits /= temperature[rows, None] if isinstance(temperature, Tensor) else temperature
            if support is not None:
                logits.masked_fill_(_mask_outside(support, start, *logits.shape), -torch.inf)
            all_logprobs = logits.log_softmax(-1)
            columns = targets[rows, None]
            logprobs[rows] = all_logprobs.gather(1, columns).squeeze(1)
            log_totals[rows] = logits.gather(1, columns).squeeze(1) - logprobs[rows]
            entropies[rows] = torch.special.entr(all_logprobs.exp_()).sum(-1)
        truncation = None if support is None else Truncation(support, first_token_id, blocks)
        ctx.save_for_backward(hidden, weight, targets - first_token_id, log_totals, entropies)
        ctx.settings = (temperature, blocks, truncation, _compute_logits)
        # Logits are not stored: `forward` computes them by tokens, but the backward pass needs blocks of the
        # vocabulary.
        ctx.saved_logits = None
        return logprobs, entropies


def _compute_logits(
    hidden: Tensor, weight: Tensor, block: range, temperature: float | Tensor, logit_memory: Tensor
) -> Tensor:
    """Return the logits of a block of this rank's vocabulary, float32 [tokens, block]. `logit_memory` has no effect."""
    # Round before dividing by the temperature, as in `forward`: otherwise probabilities near 1 would exceed 1.
    logits = row_product(hidden, weight[block.start : block.stop]).float()
    return logits.div_(temperature[:, None] if isinstance(temperature, Tensor) else temperature)


def _gather_vocabulary_widths(weight: Tensor, group: dist.ProcessGroup | None) -> list[int]:
    """Return the tokens in each rank's vocabulary part. `weight` is [local_vocabulary, hidden_size]."""
    if group is None or group.size() == 1:
        return [weight.size(0)]
    width = torch.tensor([weight.size(0)], device=weight.device)
    widths = [torch.empty_like(width) for _ in range(group.size())]
    dist.all_gather(widths, width, group=group)
    return torch.cat(widths).tolist()


def _gather_vocabulary(logits: Tensor, widths: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Return the logits [tokens, vocabulary] of all ranks from this rank's part [tokens, local_vocabulary]."""
    if len(widths) == 1:
        return logits
    # A collective needs equal sizes. The last ranks' parts may be shorter, or empty.
    padded = F.pad(logits, (0, max(widths) - logits.size(1)))
    parts = [torch.empty_like(padded) for _ in widths]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)


def _mask_outside(support: Support, first_token: int, num_tokens: int, vocabulary_size: int) -> Tensor:
    """Return bool [num_tokens, vocabulary_size] from token `first_token` on: True for ids outside a token's set.

    A token without a set has only False.
    """
    ends_of_sets = support.counts.long().cumsum(0)
    counts = support.counts[first_token : first_token + num_tokens].long()
    last_set_end = int(ends_of_sets[first_token + num_tokens - 1])
    ids = support.token_ids[last_set_end - int(counts.sum()) : last_set_end].long()
    is_excluded = (counts > 0)[:, None].repeat(1, vocabulary_size)
    tokens = torch.arange(num_tokens, device=ids.device).repeat_interleave(counts)
    is_excluded[tokens, ids] = False
    return is_excluded
