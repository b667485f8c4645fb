"""Distillation targets: stored in host memory by the teacher's ranks, fetched by the policy's ranks.

A target is the part of the teacher's distribution that the loss needs at one token. It is up to a hundred times larger
than the token's other data, so the driver never gets it. Teacher and policy may have different parallel sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from megarl.data.token_batch import TokenBatch
from megarl.groups import signed
from megarl.models.distillation.teacher_student import StudentModel, TeacherTargets
from megarl.training.exchange import fetch_values, token_runs
from megarl.training.rows.feeds import RowFeed
from megarl.training.rows.microbatch import Microbatch, indices_in_row, is_predicted


class StoredTargets:
    """Targets that this rank stores for the next update, by sequence number: uint8 [trained tokens, bytes]."""

    def __init__(self) -> None:
        self._rows: dict[int, NDArray[np.uint8]] = {}

    @property
    def numbers(self) -> list[int]:
        return list(self._rows)

    def store(self, sequence_number: int, rows: NDArray[np.uint8]) -> None:
        self._rows[sequence_number] = rows

    def read_span(self, sequence_number: int, first_token: int, end_token: int) -> NDArray[np.uint8]:
        """Return the targets [tokens, bytes] of a span of a sequence's trained tokens."""
        return self._rows[sequence_number][first_token:end_token]

    def clear(self) -> None:
        self._rows = {}


@dataclass(frozen=True, slots=True)
class TargetPositions:
    """Positions of a padded row whose next token is trained, in row order. Arrays are [positions]."""

    index_in_row: NDArray[np.int64]
    sequence: NDArray[np.int64]
    """Index of the sequence in the row."""
    ordinal: NDArray[np.int64]
    """Number of earlier trained tokens in the sequence."""

    @classmethod
    def of_row(cls, row: TokenBatch, padded_lengths: NDArray[np.int64]) -> TargetPositions:
        """Return the positions of a whole row. `padded_lengths`: [sequences]."""
        is_trained = row.loss_mask & is_predicted(row.cu_seqlens)
        # Position t predicts token t + 1, hence the - 1 below.
        sequence = np.repeat(np.arange(row.num_sequences), row.lengths)[is_trained]
        counts = np.bincount(sequence, minlength=row.num_sequences)
        ordinal = np.arange(len(sequence)) - (np.cumsum(counts) - counts)[sequence]
        return cls(indices_in_row(row.lengths, padded_lengths)[is_trained] - 1, sequence, ordinal)

    def select_local(self, rank_indices: NDArray[np.int64]) -> tuple[TargetPositions, NDArray[np.int64]]:
        """Select the positions stored on this rank; `rank_indices` [tokens] are the row's indices of this rank's
        tokens.

        Returns these positions, and the index of each in `rank_indices`.
        """
        position_of_index = np.full(max(rank_indices.max(initial=-1), self.index_in_row.max(initial=-1)) + 1, -1)
        position_of_index[self.index_in_row] = np.arange(len(self.index_in_row))
        positions_of_rank = position_of_index[rank_indices]
        is_target = positions_of_rank >= 0
        positions_of_rank = positions_of_rank[is_target]
        return TargetPositions(
            self.index_in_row[positions_of_rank], self.sequence[positions_of_rank], self.ordinal[positions_of_rank]
        ), is_target.nonzero()[0]


class TargetFetcher(RowFeed):
    """Feed that gives the policy's forward passes their distillation targets, and the teachers' output layers (heads).

    A head turns a teacher's hidden states into logits. All arguments are lists by teacher number. `target_bytes`: bytes
    of a target. `num_local_tokens`: tokens known to the teacher in this rank's part of the policy's head. `heads`
    return the teacher's rows of these tokens, [tokens, hidden] (full_vocabulary; else None).
    """

    def __init__(
        self,
        stored: StoredTargets,
        device: torch.device,
        *,
        target_bytes: Sequence[int],
        num_local_tokens: Sequence[int],
        heads: Sequence[Callable[[], Tensor] | None],
    ) -> None:
        self._stored, self._device = stored, device
        self._target_bytes, self._num_local_tokens, self._heads = target_bytes, num_local_tokens, heads
        self._device_heads: list[Tensor | None] = []

    def fetch(self, rows: Sequence[TokenBatch], batches: Sequence[Microbatch]) -> Sequence[Sequence[TeacherTargets]]:
        """Fetch the targets of each row from each teacher into host memory. A collective over the world.

        Ranks before the last pipeline stage get no targets. On the last stage, only the first tensor-parallel rank gets
        their contents; `complete` broadcasts them. Then all ranks remove their stored targets.
        """
        if rows[0].target_keys is None:
            return [()] * len(rows)
        is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        # Only one tensor-parallel rank fetches: the network carries each target once, and NVLink the copies.
        is_fetching = is_last and parallel_state.get_tensor_model_parallel_rank() == 0
        holders = {
            sequence_number: rank
            for rank, stored_numbers in enumerate(signed.gather(self._stored.numbers, purpose="distillation targets"))
            for sequence_number in stored_numbers
        }
        all_targets: list[list[TeacherTargets]] = [[] for _ in rows]
        for teacher in range(len(self._target_bytes)):
            targets_by_row = self._fetch_from_teacher(teacher, rows, batches, holders, is_fetching=is_fetching)
            for row_targets, targets in zip(all_targets, targets_by_row, strict=True):
                row_targets.append(targets)
        self._stored.clear()
        # Heads are on the device during an update only; they are as large as the policy's own head.
        self._device_heads = [None if head is None else head().to(self._device) for head in self._heads]
        return all_targets if is_last else [[] for _ in rows]

    def _fetch_from_teacher(
        self,
        teacher: int,
        rows: Sequence[TokenBatch],
        batches: Sequence[Microbatch],
        holders: Mapping[int, int],
        *,
        is_fetching: bool,
    ) -> list[TeacherTargets]:
        """Return one teacher's targets of each row, requested from the ranks that store them. A collective.

        `holders` has the storing rank by sequence number. Without `is_fetching`, the contents are empty memory.
        """
        target_bytes = self._target_bytes[teacher]
        local_positions = [_local_positions(row, batch, teacher) for row, batch in zip(rows, batches, strict=True)]
        runs_by_row = []
        if is_fetching:
            runs_by_row = [
                _trained_runs(row, positions) for row, (positions, _) in zip(rows, local_positions, strict=True)
            ]
        requested_runs = np.concatenate([np.zeros((0, 3), np.int64), *runs_by_row])
        run_holders = np.array(
            [holders[sequence_number] for sequence_number in requested_runs[:, 0].tolist()], np.int64
        )
        run_targets = fetch_values(requested_runs, run_holders, self._stored_for, np.zeros((0, target_bytes), np.uint8))
        targets_by_row = iter(np.split(run_targets, _row_boundaries(runs_by_row)))
        all_targets = []
        for _, indices in local_positions:
            contents = next(targets_by_row) if is_fetching else np.empty((len(indices), target_bytes), np.uint8)
            all_targets.append(
                TeacherTargets(
                    torch.from_numpy(indices), torch.from_numpy(contents), self._num_local_tokens[teacher], None
                )
            )
        return all_targets

    def apply(self, chunk: torch.nn.Module, values: Sequence[TeacherTargets]) -> None:
        if chunk.post_process:
            assert isinstance(chunk, StudentModel)
            chunk.set_targets(self.complete(values))

    def complete(self, all_targets: Sequence[TeacherTargets]) -> list[TeacherTargets]:
        """Broadcast a row's targets to the devices of all tensor-parallel ranks, and add the heads.

        A collective of these ranks.
        """
        group: Any = parallel_state.get_tensor_model_parallel_group()
        completed = []
        for targets, head in zip(all_targets, self._device_heads, strict=True):
            # Allocated by torch: an empty numpy array has strides that torch cannot view as another dtype.
            contents = torch.empty(targets.contents.shape, dtype=torch.uint8, device=self._device).copy_(
                targets.contents
            )
            if dist.get_world_size(group) > 1:
                dist.broadcast(contents, group=group, group_src=0)
            completed.append(targets._replace(indices=targets.indices.to(self._device), contents=contents, head=head))
        return completed

    def release(self) -> None:
        self._device_heads = []

    def _stored_for(self, rank: int, sequence_number: int, first_token: int, end_token: int) -> NDArray[np.uint8]:
        return self._stored.read_span(sequence_number, first_token, end_token)


def _trained_runs(row: TokenBatch, positions: TargetPositions) -> NDArray[np.int64]:
    assert row.target_keys is not None
    return token_runs(row.target_keys[:, 1:], positions.sequence, positions.ordinal)


def _local_positions(row: TokenBatch, batch: Microbatch, teacher: int) -> tuple[TargetPositions, NDArray[np.int64]]:
    """Return the positions on this rank for which one teacher has targets, and each position's index in the rank's
    tokens.
    """
    assert row.target_keys is not None and batch.row.host_local is not None
    positions, indices = TargetPositions.of_row(row, batch.padded_lengths).select_local(batch.row.host_local)
    is_of_teacher = row.target_keys[positions.sequence, 0] == teacher
    return TargetPositions(
        positions.index_in_row[is_of_teacher], positions.sequence[is_of_teacher], positions.ordinal[is_of_teacher]
    ), indices[is_of_teacher]


def _row_boundaries(runs: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the indices [rows - 1] that split the fetched targets by row. `runs` has one array [runs, 3] per row."""
    return np.cumsum([(row_runs[:, 2] - row_runs[:, 1]).sum() for row_runs in runs])[:-1].astype(np.int64)
