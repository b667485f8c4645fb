"""The driver's proxy of a model on the ranks: it packs batches into rows, sends them, and reorders the results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.cluster.row_packing import RowPacking
from megarl.config.model_fields import field_of_model
from megarl.config.parallel import ParallelConfig
from megarl.data.packing import Costs, count_tokens
from megarl.data.token_batch import TokenBatch
from megarl.families.flops import forward_flops, sequence_flops, update_only_flops
from megarl.families.shape import ModelShape
from megarl.tracking.outcomes import Update, merge_ranks
from megarl.tracking.spikes import SpikeDetector
from megarl.types import MegarlError

ONE_AFTER_THE_OTHER = RowPacking()


@dataclass(slots=True)
class Work:
    """Counters of the trainer's work since the last `take`."""

    update_tokens: int = 0
    """Tokens in updates of the policy."""
    flops: float = 0.0
    """Model FLOPs of all updates and forward passes."""
    represented_tokens: int = 0
    """Tokens of sequences in all passes of models whose packing can save tokens."""
    stored_tokens: int = 0
    """Tokens computed in these models' passes, so without the saved tokens."""
    saved_flops: float = 0.0
    """Model FLOPs that the packing saved. `flops` does not include them."""
    refused_rows: int = 0
    """Rows packed without saving tokens, although this would save enough work."""

    def take(self) -> Work:
        snapshot = replace(self)
        self._set_counts(Work())
        return snapshot

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Context that restores the counts when it ends, for passes of an evaluation."""
        counts_before = replace(self)
        try:
            yield
        finally:
            self._set_counts(counts_before)

    def _set_counts(self, counts: Work) -> None:
        for counter in fields(self):
            setattr(self, counter.name, getattr(counts, counter.name))


@dataclass(frozen=True, slots=True)
class RankModel:
    """A model on the ranks, called by the driver with whole batches.

    A row is one packed microbatch. The driver sends a data-parallel replica's rows to its first rank, which broadcasts
    them.
    """

    group: WorkerGroup
    parallel: ParallelConfig
    max_tokens_per_microbatch: int
    """Maximum tokens in a row."""
    max_tokens_per_forward: int | None = None
    """Maximum tokens in a row of a forward pass without gradients. None: `max_tokens_per_microbatch`."""
    row_multiple: int = 1
    """A row's capacity is rounded down to a multiple of this."""
    together: int = 1
    """Consecutive sequences that must share a row: 2 for preference pairs."""
    keeps_samples: bool = False
    """Whether all sequences of a sample share a row in updates. Losses over whole trajectories need this."""
    name: str = "policy"
    """Name on the ranks: policy, reference, critic or another."""
    shape: ModelShape | None = None
    """Sizes to count FLOPs and balance rows. None: rows are balanced by tokens."""
    update_passes: float = 3.0
    """FLOPs of an update as a multiple of a forward pass: 3, or 2 if the base weights have no gradients."""
    packing: RowPacking = ONE_AFTER_THE_OTHER
    spikes: SpikeDetector | None = None
    """Detector of updates to drop (train.on_spike). None: no update is dropped for its size."""
    work: Work = field(default_factory=Work)
    """Counters of work, perhaps shared by several models."""

    async def update(
        self, batch: TokenBatch, kl_coefficient: float | None = None, *, kto_kl: float | None = None
    ) -> Update:
        """Run one optimizer step on a whole batch, and return its outcome and metrics.

        `kl_coefficient` weighs the KL to the reference (default: algorithm.kl_coefficient). `kto_kl` is the KL of the
        KTO loss, in nats per answer. All ranks drop an update above the limits of `spikes`. Raises MegarlError if the
        sequences of a sample must share a row and do not fit.
        """
        packed = self._pack_samples(batch) if self.keeps_samples else self._assign_rows(batch, self.together)
        rows = self._make_rows(batch, packed, self.update_passes)
        if self.shape is not None:
            self.work.flops += update_only_flops(self.shape, batch.lengths)
        if self.name == "policy":
            # A critic trains on the same tokens. Counting them twice would double the reported rate.
            self.work.update_tokens += len(batch.token_ids)
        limits = None if self.spikes is None else self.spikes.limits()
        rank_results = await self.group.scatter(
            f"{self.name}.update", self.give_to_first_ranks(rows), kl_coefficient, kto_kl, limits
        )
        update = merge_ranks([rank_results[rank] for ranks in self._list_reporting_ranks() for rank in ranks])
        if self.spikes is not None:
            self.spikes.add(update.outcome)
        return update

    async def forward(self, batch: TokenBatch) -> NDArray[np.float32]:
        """Compute log-probs in nats (policy, reference) or values (critic, reward model): float32 [tokens].

        Entry t is for the prediction of token t. It is zero on the first token of each sequence. Raises MegarlError if
        a model other than the policy has a value that is not finite for a trained token.
        """
        # A forward pass reads only the tokens, so the other arrays are not sent.
        tokens_only = batch.with_arrays({})
        values = await self.gather(f"{self.name}.forward", tokens_only, max_tokens=self.max_tokens_per_forward)
        # Updates with the policy's own values of this kind are skipped by the ranks, which report the tensor.
        if self.name != "policy":
            self._refuse_not_finite(batch, values)
        return values

    def _refuse_not_finite(self, batch: TokenBatch, values: NDArray[np.float32]) -> None:
        """Raise MegarlError if a trained token has a score that is not finite, or a log-prob of NaN or +inf."""
        is_score = self.shape is not None and self.shape.has_value_head
        # A log-prob of -inf is a token that the model cannot produce.
        is_faulty = batch.loss_mask & (~np.isfinite(values) if is_score else ~(values < np.inf))
        if not is_faulty.any():
            return
        first_index = int(is_faulty.argmax())
        sequence = int(np.searchsorted(batch.cu_seqlens, first_index, side="right")) - 1
        raise MegarlError(
            f"{field_of_model(self.name)}: the model {self.name} computed {is_faulty.sum()} "
            f"{'scores' if is_score else 'log-probs'} that are not finite, of {batch.loss_mask.sum()}. The first is "
            f"{values[first_index]} in sequence {sequence} of {batch.num_sequences}. Check its weights and "
            "config.json; for an overflow in its dtype, set model.dtype=float32"
        )

    async def forward_with_entropies(self, batch: TokenBatch) -> NDArray[np.float32]:
        """Compute the policy's log-probs and entropies in nats: float32 [2, tokens], with entries as in `forward`."""
        return await self.gather(
            f"{self.name}.forward_with_entropies", batch.with_arrays({}), max_tokens=self.max_tokens_per_forward
        )

    async def gather(
        self, method: str, batch: TokenBatch, *args: Any, max_tokens: int | None = None
    ) -> NDArray[np.float32]:
        """Call a method that returns values of each token, and return them in the batch's order: float32 [..., tokens].

        The method gets a replica's rows and `args`. A row has at most `max_tokens` tokens (None:
        `max_tokens_per_microbatch`). Sequences repeated to fill rows have no trained token.
        """
        filled_indices = self.indices_with_repeats(batch.num_sequences)
        filled = batch if len(filled_indices) == batch.num_sequences else batch.select(filled_indices)
        filled.loss_mask[batch.cu_seqlens[-1] :] = False
        packed = self._assign_rows(filled, self.together, max_tokens)
        rows = self._make_rows(filled, packed, 1.0, num_counted=batch.num_sequences, max_tokens=max_tokens)
        results = await self.group.scatter(method, self.give_to_first_ranks(rows), *args)
        rows_and_values = [
            (row, values)
            for replica, (reporting_rank, *_) in zip(packed, self._list_reporting_ranks(), strict=True)
            for row, values in zip(replica, results[reporting_rank], strict=True)
        ]
        gathered = np.zeros((*rows_and_values[0][1].shape[:-1], len(batch.token_ids)), np.float32)
        for row, values in rows_and_values:
            # Drop the values of repeated sequences, which only fill rows (see `filled`).
            is_original = np.repeat(np.asarray(row) < batch.num_sequences, batch.lengths[filled_indices[row]])
            gathered[..., batch.tokens_of(filled_indices[row])[is_original]] = values[..., is_original]
        return gathered

    def forward_rows(self, batch: TokenBatch, num_counted: int) -> list[list[TokenBatch]]:
        """Return the rows of a forward pass by replica. Only the first `num_counted` sequences count as work."""
        packed = self._assign_rows(batch, self.together, self.max_tokens_per_forward)
        return self._make_rows(batch, packed, 1.0, num_counted=num_counted, max_tokens=self.max_tokens_per_forward)

    def _make_rows(
        self,
        batch: TokenBatch,
        packed: list[list[list[int]]],
        work_factor: float,
        *,
        num_counted: int | None = None,
        max_tokens: int | None = None,
    ) -> list[list[TokenBatch]]:
        """Return a batch's rows by replica, and count their work. `packed` holds the sequences of each row.

        `work_factor` is the work as a multiple of a forward pass. Only the first `num_counted` sequences count (None:
        all).
        """
        num_counted = batch.num_sequences if num_counted is None else num_counted
        capacity = self._row_capacity(max_tokens)
        return [
            [self._make_row(batch, row, work_factor, num_counted, capacity) for row in replica] for replica in packed
        ]

    def _make_row(
        self, batch: TokenBatch, sequences: list[int], work_factor: float, num_counted: int, capacity: int
    ) -> TokenBatch:
        """Return one row, packed as `arrange` chooses, and count its work."""
        row = batch.select(sequences)
        savings = self.packing.arrange(
            row,
            sequence_multiple=self.parallel.sequence_multiple,
            capacity=capacity,
            costs=self._costs,
        )
        is_counted = np.asarray(sequences) < num_counted
        lengths = row.lengths[is_counted]
        saved_tokens = np.zeros_like(lengths) if savings is None else savings.tokens[is_counted]
        # Count the row's tokens and FLOPs with and without the savings.
        if savings is not None:
            self.work.represented_tokens += int(lengths.sum())
            self.work.stored_tokens += int((lengths - saved_tokens).sum())
            self.work.refused_rows += savings.is_refused
        if self.shape is not None:
            saved_flops = forward_flops(self.shape, saved_tokens)
            self.work.flops += work_factor * (forward_flops(self.shape, lengths) - saved_flops)
            self.work.saved_flops += work_factor * saved_flops
        return row

    def indices_with_repeats(self, num_sequences: int) -> NDArray[np.int64]:
        """Return the indices of a batch's sequences, padded by repeating the last ones: int64 [sequences].

        Every rank then has the same number of rows, and none is empty.
        """
        multiple = self.parallel.dp * self.parallel.rows_multiple * self.together
        num_missing = -num_sequences % multiple
        all_indices = np.arange(num_sequences)
        return np.concatenate([all_indices, np.tile(all_indices[-self.together :], num_missing // self.together)])

    def _pack_samples(self, batch: TokenBatch) -> list[list[list[int]]]:
        """Assign sequences to rows, with all of a sample in one row. Raises MegarlError if one does not fit."""
        try:
            return self._assign_rows(batch, batch.num_segments)
        except ValueError as error:
            raise MegarlError(
                f"trainer.max_tokens_per_microbatch = {self.max_tokens_per_microbatch}: {error}. This "
                "algorithm.policy_loss, or algorithm.off_policy_limit, needs all segments of a trajectory in one "
                "microbatch. Raise the limit, or use a loss of single tokens, such as clipped, without "
                "algorithm.off_policy_limit."
            ) from error

    def _assign_rows(
        self, batch: TokenBatch, together: int | NDArray[np.int64], max_tokens: int | None = None
    ) -> list[list[list[int]]]:
        """Assign a batch's sequences to rows: indices by replica and row.

        `together` is the number of consecutive sequences that must share a row, or one number per group.
        """
        parallel = self.parallel
        settings: dict[str, Any] = {
            "max_tokens": self._row_capacity(max_tokens),
            "num_ranks": parallel.dp,
            "multiple": parallel.sequence_multiple,
            "rows_multiple": parallel.rows_multiple,
            "costs": self._costs,
            "together": together,
        }
        return self.packing.assign(batch, **settings)

    @property
    def _costs(self) -> Costs:
        return count_tokens if self.shape is None else sequence_flops(self.shape)

    def _row_capacity(self, max_tokens: int | None) -> int:
        return (max_tokens or self.max_tokens_per_microbatch) // self.row_multiple * self.row_multiple

    def give_to_first_ranks(self, per_replica: Sequence[Sequence[TokenBatch]]) -> list[Sequence[TokenBatch] | None]:
        """Return one argument per rank: the replica's rows for its first rank, None for its other ranks."""
        per_rank: list[Sequence[TokenBatch] | None] = [None] * self.parallel.world_size
        for replica, rows in enumerate(per_replica):
            per_rank[self.parallel.replica_ranks(replica)[0]] = rows
        return per_rank

    def _list_reporting_ranks(self) -> list[list[int]]:
        """Return the ranks that return each replica's results, in context-parallel order."""
        parallel = self.parallel
        return [
            # The last pipeline stage has the outputs. All its tensor-parallel ranks have them, so take the first rank.
            [parallel.rank(tp=0, cp=cp_index, dp=replica, pp=parallel.pp - 1) for cp_index in range(parallel.cp)]
            for replica in range(parallel.dp)
        ]
