"""Losses that balance the experts of MoE layers, as means over all tokens of an update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core import parallel_state

from megarl.data.token_batch import TokenBatch
from megarl.models.experts.balance import ExpertBalance
from megarl.platform.spans import span
from megarl.tracking.metrics import Mean, Metric
from megarl.training.model import ModelShard
from megarl.training.parts.engine_part import EnginePart


class BalancePart(EnginePart):
    """Prepares the routers for an update, and returns the metrics of their losses."""

    def __init__(self, shard: ModelShard, balance: ExpertBalance) -> None:
        self._shard, self._balance = shard, balance

    def prepare_update(self, rows: Sequence[TokenBatch]) -> None:
        """Count the update's tokens. Losses over the whole batch first need a forward pass to count tokens per
        expert.
        """
        num_tokens = torch.tensor(sum(len(row.token_ids) for row in rows), device=self._shard.device)
        torch.distributed.all_reduce(num_tokens, group=parallel_state.get_data_parallel_group())
        self._balance.begin_update(int(num_tokens))
        if self._balance.needs_counts:
            with span("count tokens per expert"), self._balance.count_tokens():
                self._shard.run_forward([row.with_arrays({}) for row in rows], lambda *_, **__: None)

    def update_metrics(self) -> dict[str, Metric]:
        losses = self._balance.metrics(self._shard.parallel.pp, self._shard.device)
        return {name: Mean(value) for name, value in losses.items()} if self._shard.returns_results else {}
