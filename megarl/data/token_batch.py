"""Batches of sequences in flat arrays, as sent to data-parallel replicas and trained on.

Entry t of a log-prob, weight or advantage belongs to the prediction of token t from the tokens before it. So the first
entry of each sequence is never trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megarl.types import PER_TOKEN, RetainedSets, TrainingSequence


@dataclass(slots=True)
class TokenBatch:
    """A batch of sequences, concatenated into flat arrays.

    `token_ids` and `loss_mask` are [tokens]. `loss_mask` is True where the token's log-prob is trained. `cu_seqlens`
    [sequences + 1] holds the sequence boundaries, from 0 to tokens. `per_token` holds the float32 arrays [tokens] named
    in `types.PER_TOKEN`.
    """

    token_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    cu_seqlens: NDArray[np.int64]
    samples: NDArray[np.int64]
    """Sample number of each sequence, in ascending order: [sequences].

    Losses and advantages treat a sample's sequences (segments) together.
    """
    per_token: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    experts: NDArray[np.int64] | None = None
    """[sequences, 2]: handle (`types.ExpertsHandle`) of the experts that the engine chose for each sequence. Training
    routes the same way. `types.NO_EXPERTS`: the engine sampled no token of this sequence.
    """
    expert_digests: NDArray[np.uint32] | None = None
    """[tokens]: a hash of each token's experts. Tokens with different experts are not shared."""
    retained_sets: RetainedSets | None = None
    """The tokens left by top-p, top-k and min-p; policy and reference renormalise each log-prob over them. None: all
    tokens of the vocabulary.
    """
    temperatures: NDArray[np.float64] | None = None
    """Temperature of the log-probs of policy and reference: [sequences]. None: 1 for all."""
    target_keys: NDArray[np.int64] | None = None
    """For distillation, [sequences, 2]: the teacher's number, and the sequence's number in the step."""
    labels: NDArray[np.int64] | None = None
    """[tokens]: the token whose log-prob is computed at each position. None: the token at that position."""
    shares_prefixes: bool = False
    """Whether the model computes shared prefixes once, as a tree. For batches of one row."""

    @classmethod
    def from_samples(cls, samples: Sequence[Sequence[TrainingSequence]]) -> TokenBatch:
        """Return a batch of samples with one or more sequences each. All must have the same optional arrays."""
        batch = cls.from_sequences([sequence for sample in samples for sequence in sample])
        batch.samples = np.repeat(np.arange(len(samples)), [len(sample) for sample in samples])
        return batch

    @classmethod
    def from_sequences(cls, sequences: Sequence[TrainingSequence]) -> TokenBatch:
        """Return a batch with one sample per sequence. All must have the same optional arrays."""
        return cls(
            token_ids=np.concatenate([sequence.token_ids for sequence in sequences]),
            loss_mask=np.concatenate([sequence.loss_mask for sequence in sequences]),
            cu_seqlens=borders([len(sequence) for sequence in sequences]),
            samples=np.arange(len(sequences)),
            per_token={
                name: np.concatenate([getattr(sequence, name) for sequence in sequences])
                for name in PER_TOKEN
                if getattr(sequences[0], name) is not None
            },
            retained_sets=join_retained([(len(sequence), sequence.retained_sets) for sequence in sequences]),
            temperatures=np.array([sequence.temperature for sequence in sequences]),
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each sequence, [sequences]."""
        return np.diff(self.cu_seqlens)

    @property
    def num_sequences(self) -> int:
        return len(self.samples)

    @property
    def prefix_keys(self) -> NDArray[np.int64]:
        """Return a key for each token, an integer from 0 on: [tokens].

        Tokens have equal keys if they have the same id and, under router replay, the same experts in all layers. Two
        sequences share their tokens before the first unequal key.
        """
        if self.expert_digests is not None:
            return self.token_ids | self.expert_digests.astype(np.int64) << 32
        if self.experts is not None:
            # Experts without hashes may differ, as in checkpoints of earlier versions: nothing is shared.
            return self.token_ids | np.repeat(np.arange(self.num_sequences), self.lengths) << 32
        return self.token_ids

    @property
    def cu_samples(self) -> NDArray[np.int64]:
        """Return the boundaries of the samples (with all segments), from 0 to tokens: [samples + 1]."""
        first_segments = np.flatnonzero(np.diff(self.samples, prepend=-1))
        return np.append(self.cu_seqlens[first_segments], self.cu_seqlens[-1])

    @property
    def num_segments(self) -> NDArray[np.int64]:
        first_segments = np.flatnonzero(np.diff(self.samples, prepend=-1))
        return np.diff(np.append(first_segments, self.num_sequences))

    @property
    def last_segments(self) -> NDArray[np.int64]:
        """Return the number of each sample's last sequence: [samples]."""
        return np.flatnonzero(np.diff(self.samples, append=-1))

    def tokens_of(self, sequences: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices in the batch of all tokens of these sequences: [tokens of these sequences]."""
        selection = np.asarray(sequences, np.int64)
        return ranges(self.cu_seqlens[selection], self.lengths[selection])

    def select(self, sequences: Sequence[int] | NDArray[np.int64]) -> TokenBatch:
        """Return a batch of these sequences, in this order. The segments of a sample must stay adjacent."""
        selection = np.asarray(sequences, np.int64)
        token_indices = self.tokens_of(selection)
        return TokenBatch(
            token_ids=self.token_ids[token_indices],
            loss_mask=self.loss_mask[token_indices],
            cu_seqlens=borders(self.lengths[selection]),
            samples=self.samples[selection],
            per_token={name: values[token_indices] for name, values in self.per_token.items()},
            experts=None if self.experts is None else self.experts[selection],
            expert_digests=None if self.expert_digests is None else self.expert_digests[token_indices],
            retained_sets=None if self.retained_sets is None else select_retained(self.retained_sets, token_indices),
            temperatures=None if self.temperatures is None else self.temperatures[selection],
            target_keys=None if self.target_keys is None else self.target_keys[selection],
            labels=None if self.labels is None else self.labels[token_indices],
        )

    def select_samples(self, samples: Sequence[int] | NDArray[np.int64]) -> TokenBatch:
        """Return a batch of these samples (by position) with all their segments, in this order."""
        counts = self.num_segments
        first_segments = np.cumsum(counts) - counts
        selection = np.asarray(samples, np.int64)
        selected = self.select(ranges(first_segments[selection], counts[selection]))
        # Renumber: the order may have changed, but sample numbers must be ascending.
        selected.samples = np.repeat(np.arange(len(selection)), counts[selection])
        return selected

    def with_arrays(self, arrays: Mapping[str, NDArray[np.float32]]) -> TokenBatch:
        """Return the same sequences with `arrays` as the only ones in `per_token`, and without `target_keys`."""
        return TokenBatch(
            self.token_ids, self.loss_mask, self.cu_seqlens, self.samples, dict(arrays), self.experts,
            self.expert_digests, self.retained_sets, self.temperatures, labels=self.labels,
            shares_prefixes=self.shares_prefixes,
        )  # fmt: skip


def concatenate(batches: Sequence[TokenBatch]) -> TokenBatch:
    """Return one batch of all sequences, with the samples renumbered. All must have the same per-token arrays."""
    samples, starts, num_samples, num_tokens = [], [np.zeros(1, np.int64)], 0, 0
    for batch in batches:
        # Sample numbers may have holes after `select`, so count their changes instead of using the numbers.
        samples.append(np.cumsum(np.diff(batch.samples, prepend=-1) != 0) - 1 + num_samples)
        starts.append(batch.cu_seqlens[1:] + num_tokens)
        num_samples += len(batch.cu_samples) - 1
        num_tokens += len(batch.token_ids)
    return TokenBatch(
        token_ids=np.concatenate([batch.token_ids for batch in batches]),
        loss_mask=np.concatenate([batch.loss_mask for batch in batches]),
        cu_seqlens=np.concatenate(starts),
        samples=np.concatenate(samples),
        per_token={name: np.concatenate([batch.per_token[name] for batch in batches]) for name in batches[0].per_token},
        retained_sets=join_retained([(len(batch.token_ids), batch.retained_sets) for batch in batches]),
        temperatures=_join_temperatures(batches),
        labels=None
        if all(batch.labels is None for batch in batches)
        else np.concatenate([batch.token_ids if batch.labels is None else batch.labels for batch in batches]),
    )


def _join_temperatures(batches: Sequence[TokenBatch]) -> NDArray[np.float64] | None:
    if all(batch.temperatures is None for batch in batches):
        return None
    # A batch without temperatures was sampled at 1.
    unit_temperatures = [np.ones(batch.num_sequences) for batch in batches]
    temperatures = [batch.temperatures for batch in batches]
    return np.concatenate(
        [
            unit_values if values is None else values
            for values, unit_values in zip(temperatures, unit_temperatures, strict=True)
        ]
    )


def select_retained(retained: RetainedSets, positions: NDArray[np.int64]) -> RetainedSets:
    """Return the retained sets of the tokens at the positions `positions` [tokens].

    Position -1 gives an empty set: nothing was cut off.
    """
    # The appended entry of size 0 is what place -1 selects.
    counts = np.append(retained.counts, np.int32(0))
    starts = np.cumsum(counts, dtype=np.int64) - counts
    sizes = counts[positions]
    return RetainedSets(sizes, retained.token_ids[ranges(starts[positions], sizes.astype(np.int64))])


def join_retained(parts: Sequence[tuple[int, RetainedSets | None]]) -> RetainedSets | None:
    """Concatenate the retained sets of parts (number of tokens, sets). None: no part has sets.

    A part without sets gets an empty set for each token.
    """
    if all(sets is None for _, sets in parts):
        return None
    all_sets = [sets or RetainedSets(np.zeros(tokens, np.int32), np.zeros(0, np.int32)) for tokens, sets in parts]
    return RetainedSets(
        np.concatenate([sets.counts for sets in all_sets]), np.concatenate([sets.token_ids for sets in all_sets])
    )


def places_by_rank(ranks: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Return each item's index in the items of all ranks, rank after rank, and the number of items per rank.

    `ranks` [items] has each item's rank; the index is [items]. Ranks are padded to the fullest rank's number of items.
    """
    counts = np.bincount(ranks)
    items_per_rank = int(counts.max())
    places = np.empty_like(ranks)
    places[np.argsort(ranks, kind="stable")] = ranges(np.arange(len(counts)) * items_per_rank, counts)
    return places, items_per_rank


def borders(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the cumulative lengths from 0: [sequences] to [sequences + 1]."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def ranges(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the concatenated integer ranges start, start + 1, ..., start + size - 1: [sum of sizes]."""
    ends = np.cumsum(sizes)
    return np.repeat(starts - (ends - sizes), sizes) + np.arange(ends[-1] if len(ends) else 0)
