"""Teacher models of distillation on one rank: frozen, they compute distillation targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from megarl.data.token_batch import TokenBatch
from megarl.groups.megatron_ranks import RankGroups
from megarl.models.distillation.teacher_student import TargetModel, TeacherModel, count_not_finite
from megarl.models.policy import PackedModel
from megarl.training.distillation.targets import StoredTargets, TargetPositions
from megarl.training.model import FrozenModel, ModelShard
from megarl.training.rows.feeds import RowFeed
from megarl.training.rows.microbatch import Microbatch, whole_row


class TargetRequestFeed(RowFeed):
    """Feed that marks the trained tokens of a row for a teacher: only these get targets."""

    def fetch(self, rows: Sequence[TokenBatch], batches: Sequence[Microbatch]) -> Sequence[Tensor]:
        return [batch.mask for batch in batches]

    def apply(self, chunk: torch.nn.Module, values: Tensor) -> None:
        if chunk.post_process:
            assert isinstance(chunk, TargetModel)
            chunk.request_targets(values)


class Teacher(FrozenModel):
    """Frozen model whose whole distributions the policy learns, not only its log-probs of sampled tokens.

    `num_common_tokens`: tokens that its vocabulary shares with the policy's. `stored` receives the targets.
    """

    def __init__(self, *args: Any, num_common_tokens: int, stored: StoredTargets, **kwargs: Any) -> None:
        self._num_common_tokens, self._stored = num_common_tokens, stored
        super().__init__(*args, **kwargs)

    def _build_chunk(self, index: int) -> PackedModel:
        return self.parts.build_policy(
            TeacherModel,
            self.config,
            self.shape,
            vp_stage=self._vp_stage(index),
            distillation=self.recipe.distillation,
            num_common_tokens=self._num_common_tokens,
            **self._head_settings(),
        )

    def store_targets(self, rows: Sequence[TokenBatch] | None) -> int:
        """Compute and store this teacher's targets for the trained tokens of its replica's rows.

        If the replica has several ranks, only the first passes rows; the others pass None. Returns the number of
        targets stored by this rank that are not finite.
        """
        with self.on_device():
            return store_model_targets(self, rows, self._stored)


def store_model_targets(model: ModelShard, rows: Sequence[TokenBatch] | None, stored: StoredTargets) -> int:
    """Store a model's targets of the trained tokens of this replica's rows, by sequence number.

    Returns the number of stored targets that are not finite.

    Ranks of the last pipeline stage take turns: each stores every n-th row, which spreads the host memory.
    """
    replica_rows = model.share_rows(rows)
    # All tensor- and context-parallel ranks of a replica's last stage have the same rows, so these ranks share them.
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    num_sharing_ranks = tp_size * parallel_state.get_context_parallel_world_size()
    index_among_ranks = parallel_state.get_context_parallel_rank() * tp_size
    index_among_ranks += parallel_state.get_tensor_model_parallel_rank()
    numbered_rows = enumerate(replica_rows)
    num_not_finite = 0

    def store_next_row(output: Tensor, batch: Microbatch, non_loss_data: bool) -> None:
        """Store a row's targets, `output` [local tokens, bytes].

        Megatron calls this after each row, in their order. Otherwise it would collect all outputs on the device.
        """
        nonlocal num_not_finite
        row_index, row = next(numbered_rows)
        # A collective: every rank takes part, also if another rank stores the row.
        targets = whole_row(output, batch.row)
        if row_index % num_sharing_ranks == index_among_ranks:
            positions = TargetPositions.of_row(row, batch.padded_lengths)
            trained_targets = targets[torch.from_numpy(positions.index_in_row).to(targets.device)]
            num_not_finite += count_not_finite(trained_targets, model.recipe.distillation, model.dtype)
            _store_by_sequence(row, positions, trained_targets, stored)

    feed = TargetRequestFeed()
    model.feeds.append(feed)
    try:
        model.run_forward(replica_rows, store_next_row)
    finally:
        model.feeds.remove(feed)
    return num_not_finite


def _store_by_sequence(
    row: TokenBatch, positions: TargetPositions, trained_targets: Tensor, stored: StoredTargets
) -> None:
    """Store a row's targets by sequence. `trained_targets`: uint8 [positions, bytes]."""
    assert row.target_keys is not None
    targets_per_sequence = np.bincount(positions.sequence, minlength=row.num_sequences)
    host_targets = trained_targets.cpu().numpy()
    for sequence_number, sequence_targets in zip(
        row.target_keys[:, 1].tolist(), np.split(host_targets, np.cumsum(targets_per_sequence)[:-1]), strict=True
    ):
        stored.store(sequence_number, sequence_targets)


class ModelInOwnGroups:
    """Frozen model with other parallel sizes than the policy's. It runs in its own process groups."""

    def __init__(self, model: FrozenModel, groups: RankGroups) -> None:
        self._model, self._groups = model, groups

    def forward(self, rows: Sequence[TokenBatch] | None) -> list[NDArray[np.float32]] | None:
        with self._groups.in_place():
            return self._model.forward(rows)

    def store_targets(self, rows: Sequence[TokenBatch] | None) -> int:
        assert isinstance(self._model, Teacher)
        with self._groups.in_place():
            return self._model.store_targets(rows)
