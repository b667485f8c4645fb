"""The driver's side of a model on the ranks: sends a batch to the replicas in packed rows, reorders the results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megarl.cluster.worker_group import WorkerGroup
from megarl.config.parallel import ParallelConfig
from megarl.data.batch import TokenBatch
from megarl.data.packing import pack
from megarl.families.flops import forward_flops
from megarl.families.shape import ModelShape
from megarl.tracking.metrics import Metric, merge
from megarl.types import MegarlError


@dataclass(slots=True)
class Work:
    """The trainer's passes since they were last counted.

    Tokens of the policy's updates, and model FLOPs of all updates and of scoring.
    """

    update_tokens: int = 0
    flops: float = 0.0

    def take(self) -> Work:
        """A copy, after which counting begins anew."""
        taken = Work(self.update_tokens, self.flops)
        self.update_tokens, self.flops = 0, 0.0
        return taken

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Within, passes are not counted: those of an evaluation."""
        before = self.update_tokens, self.flops
        try:
            yield
        finally:
            self.update_tokens, self.flops = before


@dataclass(frozen=True, slots=True)
class RankModel:
    """A model on the ranks, called with whole batches.

    `name` is its name in `worker.trainer.TrainerWorker`. A replica's rows are sent to its first rank, which broadcasts
    them within the replica.
    """

    group: WorkerGroup
    layout: ParallelConfig
    max_tokens_per_microbatch: int
    row_multiple: int = 1
    attention_ratio: float = 65536.0
    together: int = 1
    """Number of consecutive sequences that must share a row: 2 for pairs."""
    keeps_samples: bool = False
    """Whether in updates all sequences of a sample share a row, for losses of whole trajectories."""
    name: str = "policy"
    shape: ModelShape | None = None
    """Its sizes, for the FLOPs of its passes; None: they are not counted."""
    update_passes: float = 3.0
    """An update's FLOPs as a multiple of a forward pass's: 3, but 2 where only adapters have gradients of weights."""
    work: Work = field(default_factory=Work)
    """Where its passes are counted, with those of other models."""

    async def update(
        self, batch: TokenBatch, kl_coefficient: float | None = None, *, kto_kl: float | None = None
    ) -> dict[str, Metric]:
        """One optimizer step on a whole batch. Returns the batch's metrics.

        `kl_coefficient` and `kto_kl` as in `TrainingEngine.update`. Raises MegarlError for a sample that no row holds,
        where rows keep samples whole.
        """
        packed = self._pack_samples(batch) if self.keeps_samples else self._pack(batch.lengths, self.together)
        rows = [[batch.select(row) for row in replica] for replica in packed]
        if self.name == "policy":
            # A critic learns of the same tokens: they count once.
            self.work.update_tokens += len(batch.token_ids)
        self._count(batch, self.update_passes)
        results = await self.group.scatter(f"{self.name}.update", self._by_rank(rows), kl_coefficient, kto_kl)
        return merge(results[rank] for ranks in self._reporting_ranks() for rank in ranks)

    async def forward(self, batch: TokenBatch) -> NDArray[np.float32]:
        """Log-probs (policy, reference; nats) or values (critic, reward model) of a batch: float32 [tokens].

        Entry t belongs to predicting token t; it is zero on the sequences' first tokens.
        """
        return await self._gather("forward", batch)

    async def forward_with_entropies(self, batch: TokenBatch) -> NDArray[np.float32]:
        """As `forward` of a policy, but float32 [2, tokens]: log-probs and entropies, in nats."""
        return await self._gather("forward_with_entropies", batch)

    async def _gather(self, method: str, batch: TokenBatch) -> NDArray[np.float32]:
        """The values of every token by a method of the model: float32 [..., tokens]."""
        batch = batch.with_arrays({})
        self._count(batch, 1.0)
        sent = self._filled(batch.num_sequences)
        packed = self._pack(batch.lengths[sent], self.together)
        rows = [[batch.select(sent[row]) for row in replica] for replica in packed]
        results = await self.group.scatter(f"{self.name}.{method}", self._by_rank(rows))
        found = [
            (row, values)
            for replica, (reporting, *_) in zip(packed, self._reporting_ranks(), strict=True)
            for row, values in zip(replica, results[reporting], strict=True)
        ]
        gathered = np.zeros((*found[0][1].shape[:-1], len(batch.token_ids)), np.float32)
        for row, values in found:
            # Repeated sequences only fill rows.
            is_asked = np.repeat(np.asarray(row) < batch.num_sequences, batch.lengths[sent[row]])
            gathered[..., batch.tokens_of(sent[row])[is_asked]] = values[..., is_asked]
        return gathered

    def _count(self, batch: TokenBatch, passes: float) -> None:
        if self.shape is not None:
            self.work.flops += passes * forward_flops(self.shape, batch.lengths)

    async def teach(self, batch: TokenBatch) -> None:
        """Have a teacher write the lessons of a batch's trained tokens, which the policy's next update reads."""
        sent = batch.with_arrays({})
        sent.taught = batch.taught
        self._count(batch, 1.0)
        # A row that repeats a sequence writes the same lessons again.
        sent = sent.select(self._filled(batch.num_sequences))
        rows = [[sent.select(row) for row in replica] for replica in self._pack(sent.lengths, self.together)]
        await self.group.scatter(f"{self.name}.teach", self._by_rank(rows))

    def _filled(self, num_sequences: int) -> NDArray[np.int64]:
        """The sequences of a batch, the last ones repeated: so many that every rank has as many rows, none empty."""
        unit = self.layout.dp * self.layout.rows_multiple * self.together
        missing = -num_sequences % unit
        everything = np.arange(num_sequences)
        return np.concatenate([everything, np.tile(everything[-self.together :], missing // self.together)])

    def _pack_samples(self, batch: TokenBatch) -> list[list[list[int]]]:
        try:
            return self._pack(batch.lengths, batch.num_segments)
        except ValueError as error:
            raise MegarlError(
                f"trainer.max_tokens_per_microbatch = {self.max_tokens_per_microbatch}: {error}. algorithm.policy_loss "
                "is of whole trajectories, whose segments share a microbatch: raise it, or use a loss of tokens, such "
                "as clipped"
            ) from error

    def _pack(self, lengths: NDArray[np.int64], together: int | NDArray[np.int64]) -> list[list[list[int]]]:
        """Indices of the sequences in each row of each data-parallel replica."""
        layout, multiple = self.layout, self.row_multiple
        return pack(
            lengths,
            max_tokens=self.max_tokens_per_microbatch // multiple * multiple,
            num_ranks=layout.dp,
            multiple=layout.sequence_multiple,
            rows_multiple=layout.rows_multiple,
            attention_ratio=self.attention_ratio,
            together=together,
        )

    def _by_rank(self, per_replica: Sequence[Sequence[TokenBatch]]) -> list[Sequence[TokenBatch] | None]:
        """The rows of every replica at its first rank, None at the others."""
        per_rank: list[Sequence[TokenBatch] | None] = [None] * self.layout.world_size
        for replica, rows in enumerate(per_replica):
            per_rank[self.layout.replica_ranks(replica)[0]] = rows
        return per_rank

    def _reporting_ranks(self) -> list[list[int]]:
        """The ranks that return each replica's results, by context-parallel rank."""
        layout = self.layout
        return [
            [layout.rank(tp=0, cp=part, dp=replica, pp=layout.pp - 1) for part in range(layout.cp)]
            for replica in range(layout.dp)
        ]
