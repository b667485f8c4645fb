"""Mixtures of experts with the engine's rounding: routing weights, products of each expert, sums over experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megarl.config.parallel import EXACT_ROWS
from megarl.models.exact.gradients import add_gradient_of
from megarl.platform.exact.block_products import row_product, sum_over_ranks
from megarl.platform.exact.experts import weighted_sum


class ExactRouter(TopKRouter):
    """A router with softmax scores that rounds logits and weights as vLLM 0.30 does on a CPU.

    Its gradient is that of Megatron's router, which computes in float32.
    """

    def gating(self, input: Tensor) -> Tensor:
        """Return the logits [tokens, 1, experts], float32, for hidden states [tokens, 1, hidden_size]."""
        megatron_logits = super().gating(input)
        engine_logits = row_product(input.detach().flatten(0, -2), self.weight.detach())
        return add_gradient_of(megatron_logits, engine_logits.view_as(megatron_logits).to(megatron_logits.dtype))

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return weights, float32, and choices, bool, both [tokens, experts], for logits [tokens, 1, experts].

        Experts not chosen have weight 0.
        """
        logits = logits.flatten(0, -2)
        rounded_logits = logits.detach().to(self.weight.dtype)
        # The engine makes the same call. `torch.topk` decides which of equal logits are chosen, and their order.
        chosen_logits, experts = torch.topk(rounded_logits, k=self.topk, dim=-1, sorted=False)
        if self.config.moe_router_pre_softmax:
            megatron_weights = logits.softmax(-1).gather(1, experts)
            engine_weights = (chosen_logits - rounded_logits.logsumexp(-1, keepdim=True)).exp()
        else:
            megatron_weights = logits.gather(1, experts).softmax(-1)
            engine_weights = chosen_logits.softmax(-1)
        weights = torch.zeros_like(logits).scatter(
            1, experts, add_gradient_of(megatron_weights, engine_weights.float())
        )
        return weights, torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)


class ExactExperts(SequentialMLP):
    """Experts that return unweighted outputs. Rows of an expert are padded, as in the engine."""

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Return the experts' outputs [rows, hidden_size], for rows [rows, hidden_size] in the order of the experts.

        `tokens_per_expert` [experts] counts each expert's rows. The weights `permuted_probs` have no effect here.
        """
        outputs = []
        parts = permuted_local_hidden_states.split(tokens_per_expert.tolist())
        for expert, rows in zip(self.local_experts, parts, strict=True):
            padded_output, _ = expert(F.pad(rows, (0, 0, 0, -len(rows) % EXACT_ROWS)))
            outputs.append(padded_output[: len(rows)])
        return torch.cat(outputs), None


class ExactDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all dispatcher with one change: a token's own rank weights and adds its experts' outputs."""

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Return the experts' outputs [rows of this rank, hidden_size], in the order of the ranks that sent the rows.

        `hidden_states` [rows, hidden_size] are in the order of the experts. If experts are split over ranks, they are
        this rank's products, float32, for the rows of all these ranks.
        """
        if self.num_local_experts > 1:
            counts = self.num_global_tokens_per_local_expert.T.ravel()
            hidden_states, _ = sort_chunks_by_idxs(hidden_states, counts, self.restore_output_by_local_experts)
        if self.tp_size == 1:
            return hidden_states
        sizes: Any = self.output_splits_tp
        return _SumOwnRows.apply(hidden_states, self.tp_group, sizes.tolist(), self.config.params_dtype)

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts: [tokens, 1, hidden_size], like the layer's input.

        The argument [tokens * top_k, hidden_size] is in the order of the experts.
        """
        num_tokens, width = self.hidden_shape_before_permute
        token_of_row: Any = self.reversed_local_input_permutation_mapping
        by_token = permutated_local_input_tokens[token_of_row.argsort(stable=True)]
        weights = self.probs[self.routing_map].view(num_tokens, -1)
        return weighted_sum(by_token.view(num_tokens, -1, width), weights).view(self.hidden_shape)


class _SumOwnRows(torch.autograd.Function):
    """The rounded sum of all ranks' products for this rank's rows. `sizes` lists each rank's number of rows."""

    @staticmethod
    def forward(ctx: Any, products: Tensor, group: Any, sizes: list[int], dtype: torch.dtype) -> Tensor:
        ctx.group, ctx.sizes = group, sizes
        return sum_over_ranks(products, group).split(sizes)[group.rank()].to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        # The gradient of a sum is the gradient of each product. autograd expects the product's dtype.
        gathered = gather_from_sequence_parallel_region(grads[0], group=ctx.group, output_split_sizes=ctx.sizes)
        return gathered.float(), None, None, None


class ExactMoELayer(MoELayer):
    """Megatron's MoE layer with `ExactDispatcher`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        dispatcher: Any = self.token_dispatcher
        # Megatron-Core 0.16.1 chooses the dispatcher's class itself; the layer has no parameter for it.
        dispatcher.__class__ = ExactDispatcher
