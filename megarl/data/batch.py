"""Sequences one after the other in flat arrays: what is trained on, and what a data-parallel replica is sent.

Arrays are indexed by the token they speak of: entry t of a log-prob, weight or advantage belongs to predicting token t
from the tokens before it, so a sequence's first entry is never trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megarl.types import PER_TOKEN, KeptSets, TrainingSequence


@dataclass(slots=True)
class TokenBatch:
    """Sequences one after the other: all arrays [tokens] but `cu_seqlens` and `samples`.

    `loss_mask` is True where a token's prediction is trained. `cu_seqlens` [sequences + 1] are the sequences' borders,
    from 0 to tokens. `per_token` has the float32 arrays that `types.PER_TOKEN` names.
    """

    token_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    cu_seqlens: NDArray[np.int64]
    samples: NDArray[np.int64]
    """[sequences]: the sample that each sequence is a segment of, numbers that do not fall. Losses and advantages take
    a sample's segments together."""
    per_token: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    experts: NDArray[np.int64] | None = None
    """[sequences, 2]: `types.ExpertsHandle` of the experts that the engine sent each sequence's tokens to."""
    kept_sets: KeptSets | None = None
    """The sets that policy and reference renormalise a token's log-prob over; None: all over the whole vocabulary."""
    temperatures: NDArray[np.float64] | None = None
    """[sequences]: the temperature that policy and reference take log-probs at; None: 1 for all."""
    taught: NDArray[np.int64] | None = None
    """[sequences, 2]: the number of the teacher that a sequence is distilled from, and its own in the step."""

    @classmethod
    def from_sequences(cls, sequences: Sequence[TrainingSequence]) -> TokenBatch:
        """Sequences that are a sample each. Those of one batch have the same optional arrays."""
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
            kept_sets=join_sets([(len(sequence), sequence.kept_sets) for sequence in sequences]),
            temperatures=np.array([sequence.temperature for sequence in sequences]),
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[sequences], in tokens."""
        return np.diff(self.cu_seqlens)

    @property
    def num_sequences(self) -> int:
        return len(self.samples)

    @property
    def cu_samples(self) -> NDArray[np.int64]:
        """[samples + 1]: the borders of the samples, all segments of each, from 0 to tokens."""
        first_segments = np.flatnonzero(np.diff(self.samples, prepend=-1))
        return np.append(self.cu_seqlens[first_segments], self.cu_seqlens[-1])

    @property
    def num_segments(self) -> NDArray[np.int64]:
        """[samples]: how many sequences each sample has."""
        first_segments = np.flatnonzero(np.diff(self.samples, prepend=-1))
        return np.diff(np.append(first_segments, self.num_sequences))

    @property
    def last_segments(self) -> NDArray[np.int64]:
        """[samples]: the number of each sample's last sequence."""
        return np.flatnonzero(np.diff(self.samples, append=-1))

    def tokens_of(self, sequences: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """The places [their tokens] of these sequences' tokens, in the given order."""
        chosen = np.asarray(sequences, np.int64)
        return ranges(self.cu_seqlens[chosen], self.lengths[chosen])

    def select(self, sequences: Sequence[int] | NDArray[np.int64]) -> TokenBatch:
        """A batch of these sequences, in the given order; segments of a sample stay side by side."""
        chosen = np.asarray(sequences, np.int64)
        places = self.tokens_of(chosen)
        return TokenBatch(
            token_ids=self.token_ids[places],
            loss_mask=self.loss_mask[places],
            cu_seqlens=borders(self.lengths[chosen]),
            samples=self.samples[chosen],
            per_token={name: values[places] for name, values in self.per_token.items()},
            experts=None if self.experts is None else self.experts[chosen],
            kept_sets=None if self.kept_sets is None else select_sets(self.kept_sets, places),
            temperatures=None if self.temperatures is None else self.temperatures[chosen],
            taught=None if self.taught is None else self.taught[chosen],
        )

    def select_samples(self, samples: Sequence[int] | NDArray[np.int64]) -> TokenBatch:
        """A batch of these samples, by their places, with all segments of each, in the given order."""
        counts = self.num_segments
        first_segments = np.cumsum(counts) - counts
        chosen = np.asarray(samples, np.int64)
        selected = self.select(ranges(first_segments[chosen], counts[chosen]))
        # Numbered anew: in another order the old numbers would fall.
        selected.samples = np.repeat(np.arange(len(chosen)), counts[chosen])
        return selected

    def with_arrays(self, names: Mapping[str, NDArray[np.float32]]) -> TokenBatch:
        """The same sequences with these per-token arrays and no others; no teacher goes with them."""
        return TokenBatch(
            self.token_ids, self.loss_mask, self.cu_seqlens, self.samples, dict(names), self.experts, self.kept_sets,
            self.temperatures,
        )  # fmt: skip


def concatenate(batches: Sequence[TokenBatch]) -> TokenBatch:
    """One batch of all sequences, the samples numbered on; the batches have the same per-token arrays."""
    samples, starts, num_samples, num_tokens = [], [np.zeros(1, np.int64)], 0, 0
    for batch in batches:
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
        kept_sets=join_sets([(len(batch.token_ids), batch.kept_sets) for batch in batches]),
        temperatures=_join_temperatures(batches),
    )


def _join_temperatures(batches: Sequence[TokenBatch]) -> NDArray[np.float64] | None:
    if all(batch.temperatures is None for batch in batches):
        return None
    ones = [np.ones(batch.num_sequences) for batch in batches]
    found = [batch.temperatures for batch in batches]
    return np.concatenate([one if own is None else own for own, one in zip(found, ones, strict=True)])


def select_sets(kept: KeptSets, places: NDArray[np.int64]) -> KeptSets:
    """The sets of the tokens at these places, in the given order; an empty one, nothing cut off, at place -1."""
    counts = np.append(kept.counts, np.int32(0))
    starts = np.cumsum(counts, dtype=np.int64) - counts
    chosen = counts[places]
    return KeptSets(chosen, kept.token_ids[ranges(starts[places], chosen.astype(np.int64))])


def join_sets(parts: Sequence[tuple[int, KeptSets | None]]) -> KeptSets | None:
    """The sets of parts, one after the other, each given with its number of tokens; None if no part has any."""
    if all(kept is None for _, kept in parts):
        return None
    found = [kept or KeptSets(np.zeros(tokens, np.int32), np.zeros(0, np.int32)) for tokens, kept in parts]
    return KeptSets(np.concatenate([kept.counts for kept in found]), np.concatenate([kept.token_ids for kept in found]))


def borders(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Cumulative lengths from 0: [sequences] to [sequences + 1]."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def ranges(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The integers from each start on, so many as its size, one range after the other: [sum of sizes]."""
    ends = np.cumsum(sizes)
    return np.repeat(starts - (ends - sizes), sizes) + np.arange(ends[-1] if len(ends) else 0)
