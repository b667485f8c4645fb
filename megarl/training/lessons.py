"""Lessons of an update's tokens: kept where a teacher made them, fetched where the policy is compared with them.

A token's lesson is up to a hundred times as large as all else of it, so it never passes through the driver. A teacher's
ranks keep the lessons of whole sequences, of trained tokens alone, in host memory (`HeldLessons`); before the policy's
pass its last stage fetches those of its rows (`Pupil`). Teacher and policy may be laid out differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from megarl.data.batch import TokenBatch
from megarl.models.distillation import Lesson
from megarl.platform import signed
from megarl.training.batch import Microbatch, is_predicted, places_in_row
from megarl.training.exchange import fetched, runs_of


class HeldLessons:
    """Lessons that this rank keeps for the next update, uint8 [trained tokens, bytes], by the sequence's number."""

    def __init__(self) -> None:
        self._rows: dict[int, NDArray[np.uint8]] = {}

    @property
    def numbers(self) -> list[int]:
        """The numbers of the sequences whose lessons are here."""
        return list(self._rows)

    def keep(self, number: int, rows: NDArray[np.uint8]) -> None:
        """Keep the lessons of a sequence's trained tokens, in order."""
        self._rows[number] = rows

    def of_tokens(self, number: int, first: int, end: int) -> NDArray[np.uint8]:
        """The lessons [end - first, bytes] of these of a sequence's trained tokens."""
        return self._rows[number][first:end]

    def clear(self) -> None:
        """Forget all."""
        self._rows = {}


@dataclass(frozen=True, slots=True)
class TaughtPositions:
    """Positions of a padded row that predict a trained token, all arrays [positions], in order of the row."""

    place: NDArray[np.int64]
    sequence: NDArray[np.int64]
    """The place in the row of the sequence that the position is of."""
    ordinal: NDArray[np.int64]
    """How many trained tokens of its sequence come before."""

    @classmethod
    def of_row(cls, row: TokenBatch, padded: NDArray[np.int64]) -> TaughtPositions:
        """Those of a whole row; `padded` [sequences] is what each takes in it."""
        is_trained = row.loss_mask & is_predicted(row.cu_seqlens)
        sequence = np.repeat(np.arange(row.num_sequences), row.lengths)[is_trained]
        counts = np.bincount(sequence, minlength=row.num_sequences)
        ordinal = np.arange(len(sequence)) - (np.cumsum(counts) - counts)[sequence]
        return cls(places_in_row(row.lengths, padded)[is_trained] - 1, sequence, ordinal)

    def among(self, local: NDArray[np.int64]) -> tuple[TaughtPositions, NDArray[np.int64]]:
        """Those at a rank's places of the row, in its order, and their indices among these places."""
        found = np.full(max(local.max(initial=-1), self.place.max(initial=-1)) + 1, -1)
        found[self.place] = np.arange(len(self.place))
        chosen = found[local]
        is_taught = chosen >= 0
        chosen = chosen[is_taught]
        return TaughtPositions(self.place[chosen], self.sequence[chosen], self.ordinal[chosen]), is_taught.nonzero()[0]


class Pupil:
    """The policy's side on one rank: fetches lessons, and has the heads that turn hidden states into logits.

    By the teachers' numbers: `widths` are the bytes of a lesson, `num_local_tokens` the rows of this rank's part of the
    policy's head whose tokens the teacher has, `heads` the teacher's rows of these tokens (full_vocabulary; else None).
    """

    def __init__(
        self,
        held: HeldLessons,
        device: torch.device,
        *,
        widths: Sequence[int],
        num_local_tokens: Sequence[int],
        heads: Sequence[Tensor | None],
    ) -> None:
        self._held, self._device = held, device
        self._widths, self._num_local_tokens, self._heads = widths, num_local_tokens, heads
        self._on_device: list[Tensor | None] = []

    def fetch(self, rows: Sequence[TokenBatch], batches: Sequence[Microbatch]) -> list[list[Lesson]]:
        """The lessons of each row by each teacher, their rows in host memory; a collective over the world.

        Only the last stage has any, and of its tensor ranks the first has their contents (`complete`). What the ranks
        held is forgotten.
        """
        is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        is_asking = is_last and parallel_state.get_tensor_model_parallel_rank() == 0
        holders = {
            number: rank
            for rank, numbers in enumerate(signed.gather(self._held.numbers, purpose="lessons"))
            for number in numbers
        }
        lessons: list[list[Lesson]] = [[] for _ in rows]
        for teacher, width in enumerate(self._widths):
            own = [_own_positions(row, batch, teacher) for row, batch in zip(rows, batches, strict=True)]
            runs = [_runs(row, positions) for row, (positions, _) in zip(rows, own, strict=True)] if is_asking else []
            asked = np.concatenate([np.zeros((0, 3), np.int64), *runs])
            of_run = np.array([holders[number] for number in asked[:, 0].tolist()], np.int64)
            lessons_of_runs = fetched(asked, of_run, self._held_for, np.zeros((0, width), np.uint8))
            found = iter(np.split(lessons_of_runs, _ends(runs)))
            for of_row, (_, indices) in zip(lessons, own, strict=True):
                contents = next(found) if is_asking else np.empty((len(indices), width), np.uint8)
                places = torch.from_numpy(indices)
                of_row.append(Lesson(places, torch.from_numpy(contents), self._num_local_tokens[teacher], None))
        self._held.clear()
        self._on_device = [None if head is None else head.to(self._device) for head in self._heads]
        return lessons if is_last else [[] for _ in rows]

    def complete(self, lessons: Sequence[Lesson]) -> list[Lesson]:
        """A row's lessons on the device of every tensor rank, with the teachers' heads; a collective of these ranks."""
        group: Any = parallel_state.get_tensor_model_parallel_group()
        completed = []
        for lesson, head in zip(lessons, self._on_device, strict=True):
            # Made here: an empty array of numpy's has strides that torch cannot view as another type.
            contents = torch.empty(lesson.rows.shape, dtype=torch.uint8, device=self._device).copy_(lesson.rows)
            if dist.get_world_size(group) > 1:
                dist.broadcast(contents, group=group, group_src=0)
            completed.append(lesson._replace(places=lesson.places.to(self._device), rows=contents, head=head))
        return completed

    def release(self) -> None:
        """Give the device's memory of the heads back."""
        self._on_device = []

    def _held_for(self, rank: int, number: int, first: int, end: int) -> NDArray[np.uint8]:
        return self._held.of_tokens(number, first, end)


def _runs(row: TokenBatch, positions: TaughtPositions) -> NDArray[np.int64]:
    """[runs, 3]: number of the sequence, first and end of trained tokens that follow each other, in order."""
    assert row.taught is not None
    return runs_of(row.taught[:, 1:], positions.sequence, positions.ordinal)


def _own_positions(row: TokenBatch, batch: Microbatch, teacher: int) -> tuple[TaughtPositions, NDArray[np.int64]]:
    """The positions on this rank that a teacher is asked about, and their indices among its tokens."""
    assert row.taught is not None and batch.row.local is not None
    own, indices = TaughtPositions.of_row(row, batch.padded).among(batch.row.local.cpu().numpy())
    chosen = row.taught[own.sequence, 0] == teacher
    return TaughtPositions(own.place[chosen], own.sequence[chosen], own.ordinal[chosen]), indices[chosen]


def _ends(runs: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Where the lessons of each row but the last end: [rows - 1]."""
    return np.cumsum([(of_row[:, 2] - of_row[:, 1]).sum() for of_row in runs])[:-1].astype(np.int64)
