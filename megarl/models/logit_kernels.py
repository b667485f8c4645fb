"""Triton kernels for a block of logits on a GPU: one pass for softmax statistics, one for gradients.

torch would need ten passes over float32 copies of the logits: as much time as the matrix products, with a vocabulary of
151,936 tokens. Import this module only with a GPU: torch's CPU build has no Triton.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

# Columns that one program reads at once. At 8 warps, each thread then holds 16 logits in registers.
_COLUMNS = 4096
_WARPS = 8
_NO_LOGIT = tl.constexpr(-1.0e30)
"""Logit past the end of a row. It is finite: the difference of two infinities would be NaN."""


def block_statistics(logits: Tensor, log_totals: Tensor, entropies: Tensor) -> None:
    """Compute the log-sum-exp of each token's logits in this block, and the entropy in nats within the block.

    The results overwrite `log_totals` and `entropies`, float32 [tokens]. `logits` is [tokens, block], of any float
    type, with contiguous rows. A sum adds 4,096 partial float32 sums, for smaller rounding errors.
    """
    _statistics[(len(logits),)](  # pyright: ignore[reportIndexIssue]
        logits, log_totals, entropies, logits.size(1), logits.stride(0), BLOCK=_COLUMNS, num_warps=_WARPS
    )


def to_logit_gradients(
    logits: Tensor,
    log_totals: Tensor,
    slopes: Tensor,
    entropy_gradients: Tensor | None,
    targets: Tensor,
    logprob_gradients: Tensor,
) -> None:
    """Overwrite a block of logits with the loss's gradient for the logits.

    The gradient is p * (slope - entropy_gradient * log p), plus logprob_gradient at the target. p is the softmax over
    the whole vocabulary. The caller computes slope = -logprob_gradient - entropy_gradient * entropy.

    Shapes: logits [tokens, block], with contiguous rows; targets int64 [tokens], columns of this block, or a number
    outside the block; all others float32 [tokens]. `log_totals`: log-sum-exp of the logits over the whole vocabulary.
    `entropy_gradients` None: the loss has no entropy term.
    """
    grid = (len(logits), triton.cdiv(logits.size(1), _COLUMNS))
    _gradients[grid](  # pyright: ignore[reportIndexIssue]
        logits,
        log_totals,
        slopes,
        slopes if entropy_gradients is None else entropy_gradients,
        targets,
        logprob_gradients,
        logits.size(1),
        logits.stride(0),
        HAS_ENTROPY=entropy_gradients is not None,
        BLOCK=_COLUMNS,
        num_warps=_WARPS,
    )


@triton.jit
def _statistics(logits, log_totals, entropies, num_columns, row_stride, BLOCK: tl.constexpr):  # noqa: N803
    """Store the log of the sum of exponentials and the entropy of one row of logits, read once."""
    row = tl.program_id(0).to(tl.int64)  # A block can hold more than 2**31 logits.
    lanes = tl.arange(0, BLOCK)
    # Per lane: its largest logit, and the sums of e and of (x - largest) * e, with e = exp(x - largest). A larger logit
    # rescales the sums.
    largest = tl.full([BLOCK], _NO_LOGIT, tl.float32)
    totals = tl.zeros([BLOCK], tl.float32)
    weighted_sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        columns = start + lanes
        x = tl.load(logits + row * row_stride + columns, mask=columns < num_columns, other=_NO_LOGIT).to(tl.float32)
        new_largest = tl.maximum(largest, x)
        shift = largest - new_largest
        rescale = tl.exp(shift)
        below_largest = x - new_largest
        exponentials = tl.exp(below_largest)
        weighted_sums = rescale * (weighted_sums + shift * totals) + below_largest * exponentials
        totals = rescale * totals + exponentials
        largest = new_largest
    row_largest = tl.max(largest, 0)
    shift = largest - row_largest
    rescale = tl.exp(shift)
    weighted_sums = tl.sum(rescale * (weighted_sums + shift * totals), 0)
    totals = tl.sum(rescale * totals, 0)
    log_total = tl.log(totals)
    tl.store(log_totals + row, row_largest + log_total)
    tl.store(entropies + row, log_total - weighted_sums / totals)


@triton.jit
def _gradients(
    logits,
    log_totals,
    slopes,
    entropy_gradients,
    targets,
    logprob_gradients,
    num_columns,
    row_stride,
    HAS_ENTROPY: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Replace up to BLOCK logits of one row by their gradients (formula: `to_logit_gradients`)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < num_columns
    pointers = logits + row * row_stride + columns
    logprobs = tl.load(pointers, mask=is_inside, other=_NO_LOGIT).to(tl.float32) - tl.load(log_totals + row)
    slope = tl.load(slopes + row)
    if HAS_ENTROPY:
        slope = slope - tl.load(entropy_gradients + row) * logprobs
    gradient = tl.exp(logprobs) * slope
    gradient += tl.where(columns == tl.load(targets + row), tl.load(logprob_gradients + row), 0.0)
    tl.store(pointers, gradient.to(logits.dtype.element_ty), mask=is_inside)
