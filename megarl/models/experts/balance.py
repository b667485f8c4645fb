"""Losses that balance the experts of MoE layers, as means over all tokens of an update."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from megarl.config.libraries.library_settings import balance_losses
from megarl.tracking.metric_rows import PER_TOKEN, MetricRow

METRICS = (
    MetricRow(
        "train/moe_aux_loss",
        "1",
        "Switch balancing loss over an update's tokens without its coefficient, mean over layers; 1 is even",
    ),
    MetricRow("train/moe_global_aux_loss", "1", "like train/moe_aux_loss, for the balancing type global_aux_loss"),
    MetricRow(
        "train/moe_seq_aux_loss",
        "1",
        "balancing loss of each sequence without its coefficient, mean over tokens; 1 is even",
    ),
    MetricRow("train/moe_z_loss", "1", "squared logsumexp of the router's logits without its coefficient", PER_TOKEN),
)

_METRIC_NAMES = {
    "aux_loss": "train/moe_aux_loss",
    "global_aux_loss": "train/moe_global_aux_loss",
    "seq_aux_loss": "train/moe_seq_aux_loss",
    "z_loss": "train/moe_z_loss",
}
"""Metric of each balancing loss, by the loss's name in Megatron-Core's settings."""

_WHOLE_BATCH = ("aux_loss", "global_aux_loss")
"""Balancing losses that need the tokens per expert of the whole update."""


@dataclass(frozen=True, slots=True)
class RowTokens:
    """The tokens of one row on one rank.

    `sequences` int64 [tokens]: each token's sequence in the row. `weights` [tokens]: False or 0 on padding. `lengths`
    float32 [sequences]: tokens of each sequence of the whole row, without padding.
    """

    sequences: Tensor
    weights: Tensor
    lengths: Tensor

    def spread(self, values: Tensor) -> Tensor:
        """Return the entries of `values` [computed tokens, ...] for each token of the sequences."""
        return values

    def weigh(self, values: Tensor) -> Tensor:
        """Return values [tokens] of the sequences' tokens, zero on padding."""
        return values * self.weights


class UpdateRouter(TopKRouter):
    """Megatron's router with losses averaged over the update's tokens, and with noise in training only.

    Megatron-Core 0.16.1 multiplies a row's loss by the row's tokens on this rank, and divides only in
    `finalize_model_grads`: the sum depends on tp, cp, padding, and the sequences in a row. Here each rank's part is
    divided by the update's tokens at once.
    """

    def __init__(self, config: TransformerConfig, pg_collection: Any = None) -> None:
        super().__init__(config, pg_collection)
        assert config.num_moe_experts is not None
        self.expert_count = config.num_moe_experts
        self.losses = balance_losses(vars(config))
        self.next_row: RowTokens | None = None
        """The tokens of the next forward pass."""
        self.num_tokens = 0
        """Tokens of the update, on all ranks."""
        self.is_counting = False
        self.tokens_per_expert: Tensor | None = None
        """The update's tokens for each expert: float32 [experts]."""
        self.loss_sums: dict[str, Tensor] = {}
        """This rank's part of each loss, without its coefficient."""
        self._rows_to_recompute: deque[RowTokens] = deque()
        """Rows of checkpointed passes, in order: the backward pass computes them again."""
        self._row_of_pass: RowTokens | None = None

    def begin_update(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.tokens_per_expert = None
        self.loss_sums = {}
        self._rows_to_recompute.clear()

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> Any:
        """Route logits [tokens, experts] with Megatron's router. While `is_counting`, also count tokens per expert."""
        if self.is_counting:
            self._count_tokens(logits.view(-1, self.expert_count))
        elif self.training:
            self._set_current_row()
        return super().routing(logits, padding_mask)

    def apply_input_jitter(self, input: Tensor) -> Tensor:
        # Megatron-Core 0.16.1 adds this noise in evaluation mode too, so log-probs would differ from pass to pass.
        return super().apply_input_jitter(input) if self.training else input

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Attach the mean square of logsumexp(logits) to the logits [tokens, experts]."""
        coefficient = self.losses.get("z_loss")
        if not coefficient or not self.training or not torch.is_grad_enabled():
            return logits
        squares = torch.logsumexp(logits, dim=-1).square()
        return self._attach(
            logits, "z_loss", coefficient, (squares * self._current_row.weights).sum() / self.num_tokens
        )

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        return self._with_batch_loss(probs, scores_for_aux_loss, "aux_loss")

    def _apply_global_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        return self._with_batch_loss(probs, scores_for_aux_loss, "global_aux_loss")

    def _with_batch_loss(self, probs: Tensor, scores: Tensor, name: str) -> Tensor:
        """Attach the Switch balancing loss, experts / top_k * sum_i f_i P_i, with f and P averaged over the update's
        tokens.

        Source: Switch Transformers (Fedus et al. 2021, arXiv 2101.03961, eq. 4 to 6), over the global batch like Qiu et
        al. 2025 (arXiv 2501.11873).
        """
        coefficient = self.losses.get(name)
        if not coefficient:
            return probs
        assert self.tokens_per_expert is not None, "the update's tokens per expert were not counted"
        sums = (scores * self._current_row.weights[:, None]).sum(0)
        scale = self.expert_count / (self.topk * self.num_tokens**2)
        return self._attach(probs, name, coefficient, (sums * self.tokens_per_expert).sum() * scale)

    def _apply_seq_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> Tensor:
        """Attach the balancing loss of each sequence, weighted by its tokens.

        Source: DeepSeek-V3 (2024, arXiv 2412.19437, eq. 17 to 20).
        """
        coefficient = self.losses.get("seq_aux_loss")
        if not coefficient:
            return probs
        row_tokens = self._current_row
        routes = (routing_map & (row_tokens.weights > 0)[:, None]).float()
        routes, scores = row_tokens.spread(routes), row_tokens.spread(scores_for_aux_loss)
        expert_counts = routes.new_zeros(len(row_tokens.lengths), self.expert_count).index_add_(
            0, row_tokens.sequences, routes
        )
        # Add the counts of the tensor- and context-parallel ranks: each has a part of a sequence's tokens.
        dist.all_reduce(expert_counts, group=self.tp_cp_group)
        expert_shares = (expert_counts / row_tokens.lengths[:, None])[row_tokens.sequences]
        token_losses = row_tokens.weigh((scores * expert_shares).sum(1))
        scale = self.expert_count / (self.topk * self.num_tokens)
        return self._attach(probs, "seq_aux_loss", coefficient, token_losses.sum() * scale)

    def _attach(self, activation: Tensor, name: str, coefficient: float, loss: Tensor) -> Tensor:
        part = loss.detach()
        self.loss_sums[name] = self.loss_sums[name] + part if name in self.loss_sums else part
        return MoEAuxLossAutoScaler.apply(activation, coefficient * loss)

    def _count_tokens(self, logits: Tensor) -> None:
        assert self.next_row is not None
        routes, _ = compute_routing_scores_for_aux_loss(
            logits, self.topk, self.score_function, fused=self.config.moe_router_fusion
        )
        counts = (routes.bool() * self.next_row.weights[:, None]).sum(0)
        self.tokens_per_expert = counts if self.tokens_per_expert is None else self.tokens_per_expert + counts

    @property
    def _current_row(self) -> RowTokens:
        assert self._row_of_pass is not None
        return self._row_of_pass

    def _set_current_row(self) -> None:
        """Select the row of this pass.

        A recomputed layer runs without gradients first, then again in the backward pass, row by row in the same order.
        Forward passes of later rows may come in between.
        """
        assert self.next_row is not None
        if not torch.is_grad_enabled():
            self._rows_to_recompute.append(self.next_row)
        else:
            self._row_of_pass = self._rows_to_recompute.popleft() if self._rows_to_recompute else self.next_row


def needs_update_router(config: TransformerConfig) -> bool:
    return config.num_moe_experts is not None and bool(balance_losses(vars(config)) or config.moe_input_jitter_eps)


class ExpertBalance:
    """Prepares the balancing losses of a rank's model chunks for an update, and returns their metrics."""

    def __init__(self, config: TransformerConfig, chunks: Sequence[nn.Module]) -> None:
        self._losses = balance_losses(vars(config)) if config.num_moe_experts is not None else {}
        self._routers = routers_of(*chunks)

    @property
    def is_on(self) -> bool:
        return bool(self._losses)

    @property
    def needs_counts(self) -> bool:
        return any(name in self._losses for name in _WHOLE_BATCH)

    def begin_update(self, num_tokens: int) -> None:
        """Prepare for an update of `num_tokens` tokens, summed over all ranks."""
        for router in self._routers:
            router.begin_update(num_tokens)

    @contextmanager
    def count_tokens(self) -> Iterator[None]:
        """Context for forward passes that count the tokens per expert. At its end, counts are summed over the ranks."""
        for router in self._routers:
            router.is_counting = True
        try:
            yield
        finally:
            for router in self._routers:
                router.is_counting = False
        # Skipped after an error, because other ranks might not take part.
        for router in self._routers:
            assert router.tokens_per_expert is not None
            dist.all_reduce(router.tokens_per_expert, group=router.tp_dp_cp_group)
            router.tokens_per_expert = router.tokens_per_expert.float()

    def metrics(self, num_stages: int, device: torch.device) -> dict[str, float]:
        """Return the update's losses by metric name, averaged over layers. A collective over all ranks."""
        names = sorted(self._losses)
        # All ranks of a stage have the same layers. Each counts a layer as 1 / ranks_per_stage.
        ranks_per_stage = dist.get_world_size() // num_stages
        totals = torch.zeros(len(names) + 1, dtype=torch.float64, device=device)
        for router in self._routers:
            rank_sums = [router.loss_sums[name].double() for name in names]
            totals += torch.stack([*rank_sums, rank_sums[0].new_tensor(1 / ranks_per_stage)])
        dist.all_reduce(totals)
        *sums, num_layers = totals.tolist()
        return {_METRIC_NAMES[name]: value / num_layers for name, value in zip(names, sums, strict=True)}


def routers_of(*chunks: nn.Module) -> list[UpdateRouter]:
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, UpdateRouter)]
