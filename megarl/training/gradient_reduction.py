"""The reduction of gradients over the ranks: once for all passes of an optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.distributed import get_process_group_ranks

from megarl.config import Recipe
from megarl.families.shape import ModelShape
from megarl.platform.spans import span


class GradientReduction:
    """Makes Megatron's schedules leave the reduction of gradients over ranks to the next step, which calls
    `reduce_pending`.

    `overlaps`: gradients are reduced during the backward pass.
    """

    def __init__(self, config: TransformerConfig, models: Sequence[DistributedDataParallel], *, overlaps: bool) -> None:
        self.pending: Callable[[], None] | None = None
        """Reduces, over the ranks, the gradients of all passes since the last step. None: no such passes."""
        config.finalize_model_grads_func = self._defer
        if overlaps:
            # Within this context Megatron's schedules reduce nothing: all microbatches except the last only sum their
            # gradients.
            contexts: Any = [model.no_sync for model in models]
            config.no_sync_func = contexts if len(contexts) > 1 else contexts[0]

    def reduce_pending(self) -> None:
        if self.pending is not None:
            with span("reduce gradients"):
                self.pending()
            self.pending = None

    def _defer(self, *args: Any, **kwargs: Any) -> None:
        """Store the reduction that Megatron calls at the end of a pass, for the next step.

        Passes add to the same buffers: reducing in each of them would sum earlier gradients over the ranks again.
        """
        self.pending = partial(_sum_gradients, *args, **kwargs)


def overlaps_backward(recipe: Recipe, shape: ModelShape) -> bool:
    """Return whether gradients are reduced during the backward pass: trainer.overlap_grad_reduce, by default True if
    data-parallel ranks are on several nodes.
    """
    if (setting := recipe.trainer.overlap_grad_reduce) is not None:
        return setting
    groups: list[Any] = [parallel_state.get_data_parallel_group(with_context_parallel=True)]
    if shape.num_experts:
        groups.append(parallel_state.get_expert_data_parallel_group())
    ranks_per_node = recipe.cluster.ranks_per_node
    return any(len({rank // ranks_per_node for rank in get_process_group_ranks(group)}) > 1 for group in groups)


def _sum_gradients(model: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Reduce gradients over Megatron's ranks without dividing by tokens.

    The token weights already contain every denominator, so gradients are sums. `num_tokens` [] is ignored.
    """
    finalize_model_grads(model, None, **kwargs)
