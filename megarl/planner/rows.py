"""Longest rows (packed micro-batches) that fit into a GPU: of updates, and of passes without gradients."""

from __future__ import annotations

import math

from megarl.config import Recipe
from megarl.config.parallel import FP8_BLOCK
from megarl.planner.judge import MemoryJudge
from megarl.planner.memory.models import Models
from megarl.planner.search import find_greatest, with_field_values

_GIB = 2**30
_LONGEST_FORWARD = 8
"""Maximum row length of a pass without gradients, divided by that of an update. Longer rows save no time, and fewer
rows are harder to balance over ranks.
"""


def longest_row(recipe: Recipe, judge: MemoryJudge) -> int | None:
    """Return the greatest row length in tokens at which training fits in memory, below the recipe's.

    None: even a row with one sample does not fit.
    """
    step_tokens = _row_length_step(recipe, judge.models)
    # A reward model reads one token more than the policy is trained on.
    longest_sample = max(recipe.trained_tokens + bool(recipe.reward.model), recipe.teacher_tokens)

    def fits(num_row_steps: int) -> bool:
        with_shorter_rows = with_field_values(
            recipe, {"trainer.max_tokens_per_microbatch": num_row_steps * step_tokens}
        )
        return judge.pass_bytes(with_shorter_rows).largest <= judge.gpus.trainer * _GIB

    num_row_steps = find_greatest(
        fits,
        low=math.ceil(longest_sample / step_tokens),
        high=(recipe.trainer.max_tokens_per_microbatch - 1) // step_tokens,
    )
    return None if num_row_steps is None else num_row_steps * step_tokens


def forward_row_tokens(recipe: Recipe, judge: MemoryJudge) -> int | None:
    """Return the greatest row length in tokens at which a pass without gradients needs no more memory than an update.

    None: keep the update's row length. A longer row does not fit, or no pass is without gradients, or there are
    pipeline stages: fewer rows would leave stages idle.
    """
    if judge.models.policy.parallel.pp > 1:
        return None
    step_tokens = _row_length_step(recipe, judge.models)
    update_tokens = recipe.trainer.max_tokens_per_microbatch
    pass_bytes = judge.pass_bytes(recipe)
    if not pass_bytes.scoring:
        return None

    def fits(num_row_steps: int) -> bool:
        with_longer_rows = with_field_values(recipe, {"trainer.max_tokens_per_forward": num_row_steps * step_tokens})
        return judge.pass_bytes(with_longer_rows).scoring <= pass_bytes.training

    num_row_steps = find_greatest(
        fits, low=math.ceil(update_tokens / step_tokens), high=_LONGEST_FORWARD * update_tokens // step_tokens
    )
    if num_row_steps is None or num_row_steps * step_tokens <= update_tokens:
        return None
    return num_row_steps * step_tokens


def _row_length_step(recipe: Recipe, models: Models) -> int:
    """Return the tokens between two row lengths: every row length is a multiple."""
    parallel = models.policy.parallel
    multiple = parallel.sequence_multiple * (parallel.tp if recipe.trainer.sequence_parallel is not False else 1)
    # Under FP8 each part of a row consists of whole blocks, as in `planner.sizes.row_multiple`.
    return multiple * FP8_BLOCK if recipe.trainer.fp8 == "blockwise" else math.lcm(multiple, 128)
