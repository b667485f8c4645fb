"""The driver's side of the trainer: sequences out to its replicas in packed rows, results back in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.cluster.worker_group import WorkerGroup
from megarl.config.parallel import ParallelConfig
from megarl.data.packing import pack
from megarl.tracking.metrics import Metric, merge
from megarl.types import TrainingSequence


@dataclass(frozen=True, slots=True)
class TrainerRanks:
    """The trainer as the driver sees it: one call for the whole batch."""

    group: WorkerGroup
    layout: ParallelConfig
    max_tokens_per_microbatch: int
    row_multiple: int = 1
    attention_ratio: float = 65536.0
    together: int = 1
    """So many sequences, one after the other, share a row: the two of a pair."""

    async def update(
        self,
        sequences: Sequence[TrainingSequence],
        kl_coefficient: float | None = None,
        *,
        kto_kl: float | None = None,
        model: str = "policy",
    ) -> dict[str, Metric]:
        """One optimizer step of the `policy` or the `critic` on all sequences. Returns the whole batch's metrics.

        `kl_coefficient` and `kto_kl` as in `TrainingEngine.update`.
        """
        rows = self._pack(sequences)
        shares = [[[sequences[i] for i in row] for row in rank] for rank in rows]
        results = await self._scatter("update", shares, model, kl_coefficient, kto_kl)
        return merge(part for replica in results for part in replica)

    async def forward(self, sequences: Sequence[TrainingSequence], model: str = "policy") -> list[np.ndarray]:
        """What a model says of every token: float32 [tokens] per sequence, in order.

        Log-probs of the `policy` or the `reference`; values, before each token, of the `critic` or the `reward` model.
        """
        asked = len(sequences)
        # So many that every rank has as many rows, none of them empty.
        unit = self.layout.dp * self.layout.rows_multiple * self.together
        sequences = [*sequences, *list(sequences[-self.together :]) * (-asked % unit // self.together)]
        rows = self._pack(sequences)
        results = await self._scatter(
            "forward", [[[sequences[i] for i in row] for row in rank] for rank in rows], model
        )
        found = {
            index: values
            for rank, (result, *_) in zip(rows, results, strict=True)
            for row, row_values in zip(rank, result, strict=True)
            for index, values in zip(row, row_values, strict=True)
        }
        return [found[index] for index in range(asked)]

    def _pack(self, sequences: Sequence[TrainingSequence]) -> list[list[list[int]]]:
        """Indices of the sequences in each row of each data-parallel replica."""
        layout, multiple = self.layout, self.row_multiple
        return pack(
            [len(sequence) for sequence in sequences],
            max_tokens=self.max_tokens_per_microbatch // multiple * multiple,
            num_ranks=layout.dp,
            multiple=layout.sequence_multiple,
            rows_multiple=layout.rows_multiple,
            attention_ratio=self.attention_ratio,
            together=self.together,
        )

    async def _scatter(self, method: str, per_replica: Sequence[object], *args: object) -> list[list]:
        """Give every rank its replica's share; what the ranks of each replica report, by context part."""
        layout = self.layout
        per_rank = [per_replica[layout.coordinates(rank).dp] for rank in range(layout.world_size)]
        results = await self.group.scatter(method, per_rank, *args)
        return [
            [results[layout.rank(tp=0, cp=part, dp=replica, pp=layout.pp - 1)] for part in range(layout.cp)]
            for replica in range(layout.dp)
        ]
