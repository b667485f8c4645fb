"""The driver's side of the trainer: a batch out to its replicas in packed rows, results back in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megarl.cluster.worker_group import WorkerGroup
from megarl.config.parallel import ParallelConfig
from megarl.data.batch import TokenBatch
from megarl.data.packing import pack
from megarl.tracking.metrics import Metric, merge


@dataclass(frozen=True, slots=True)
class TrainerRanks:
    """The trainer as the driver sees it: one call for the whole batch.

    A replica's rows go to the first of its ranks alone, which hands them to the others.
    """

    group: WorkerGroup
    layout: ParallelConfig
    max_tokens_per_microbatch: int
    row_multiple: int = 1
    attention_ratio: float = 65536.0
    together: int = 1
    """So many sequences, one after the other, share a row: the two of a pair."""

    async def update(
        self,
        batch: TokenBatch,
        kl_coefficient: float | None = None,
        *,
        kto_kl: float | None = None,
        model: str = "policy",
    ) -> dict[str, Metric]:
        """One optimizer step of the `policy` or the `critic` on all of a batch. Returns the whole batch's metrics.

        `kl_coefficient` and `kto_kl` as in `TrainingEngine.update`.
        """
        rows = [[batch.select(row) for row in replica] for replica in self._pack(batch.lengths)]
        results = await self._scatter("update", rows, model, kl_coefficient, kto_kl)
        return merge(part for replica in results for part in replica)

    async def forward(self, batch: TokenBatch, model: str = "policy") -> NDArray[np.float32]:
        """A model's value of every token: float32 [tokens], zero on the sequences' first tokens.

        Log-probs of the `policy` or the `reference`; values, before each token, of the `critic` or the `reward` model.
        """
        batch = batch.with_arrays({})
        # So many that every rank has as many rows, none of them empty.
        unit = self.layout.dp * self.layout.rows_multiple * self.together
        missing = -batch.num_sequences % unit
        last = np.arange(batch.num_sequences)[-self.together :]
        sent = np.concatenate([np.arange(batch.num_sequences), np.tile(last, missing // self.together)])
        packed = self._pack(batch.lengths[sent])
        rows = [[batch.select(sent[row]) for row in replica] for replica in packed]
        results = await self._scatter("forward", rows, model)
        values = np.zeros(len(batch.token_ids), np.float32)
        for replica, (result, *_) in zip(packed, results, strict=True):
            for row, row_values in zip(replica, result, strict=True):
                # Repeated sequences only fill rows.
                is_asked = np.repeat(np.asarray(row) < batch.num_sequences, batch.lengths[sent[row]])
                values[batch.tokens_of(sent[row])[is_asked]] = row_values[is_asked]
        return values

    def _pack(self, lengths: NDArray[np.int64]) -> list[list[list[int]]]:
        """Indices of the sequences in each row of each data-parallel replica."""
        layout, multiple = self.layout, self.row_multiple
        return pack(
            lengths,
            max_tokens=self.max_tokens_per_microbatch // multiple * multiple,
            num_ranks=layout.dp,
            multiple=layout.sequence_multiple,
            rows_multiple=layout.rows_multiple,
            attention_ratio=self.attention_ratio,
            together=self.together,
        )

    async def _scatter(self, method: str, per_replica: Sequence[Sequence[TokenBatch]], *args: object) -> list[list]:
        """Give the first rank of every replica its rows; the results of each replica, by context part."""
        layout = self.layout
        per_rank: list[Sequence[TokenBatch] | None] = [None] * layout.world_size
        for replica, rows in enumerate(per_replica):
            per_rank[layout.replica_ranks(replica)[0]] = rows
        results = await self.group.scatter(method, per_rank, *args)
        return [
            [results[layout.rank(tp=0, cp=part, dp=replica, pp=layout.pp - 1)] for part in range(layout.cp)]
            for replica in range(layout.dp)
        ]
