"""Draws of problems from several sources, in proportion to their weights.

A draw depends only on the seed and on positions saved in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megarl.data.curriculum import Curriculum, Rates
from megarl.data.sampler import DataOrder
from megarl.data.streamed import Places
from megarl.tracking.metric_rows import SINCE_RUN_BEGAN, MetricRow
from megarl.types import MegarlError, Problem

METRICS = (MetricRow("curriculum/skipped", "count", "problems skipped by the curriculum", SINCE_RUN_BEGAN),)

# Bound of one search for a problem to draw: a narrow band with a tiny `outside` could otherwise search for hours.
_MAX_SKIPPED = 10_000_000
# Second numbers of seeds, so that the first credits and the curriculum's draws are independent.
_CREDITS_SEED, _CURRICULUM_SEED = 1, 2


@dataclass(frozen=True, slots=True)
class Position:
    """Position in one source's stream of problems.

    `taken` problems were drawn or skipped; the curriculum skipped `passed` of these. `credit` is the number of draws
    still due to the source by its weight. `rates` are the measured solve rates.
    """

    taken: int = 0
    passed: int = 0
    credit: float | None = None
    rates: Rates = field(default_factory=dict)


Positions = Mapping[str, Position]
"""Each source's position, by the source's name."""


@dataclass(slots=True)
class SourceStream:
    """Endless stream of one source's problems, epoch after epoch."""

    name: str
    weight: float
    problems: Sequence[Problem]
    order: DataOrder
    curriculum: Curriculum
    _epoch: tuple[int, NDArray[np.int64]] | None = None

    def data_position(self, stream_index: int) -> int:
        """Return the position in the data of the stream's problem number `stream_index`."""
        epoch, epoch_position = divmod(stream_index, self.order.num_items)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self.order.epoch(epoch)
        return int(self._epoch[1][epoch_position])


class Mixture:
    """Several sources. Problems are drawn in proportion to the sources' weights.

    Each draw goes to the source with the largest credit. After any number of draws, each source has its share, plus or
    minus one. The seed decides the initial credits. Each source has its own stream.
    """

    def __init__(self, streams: Sequence[SourceStream], seed: int) -> None:
        self._streams = {stream.name: stream for stream in streams}
        self._places = {
            stream.name: Places(stream.problems) for stream in streams if stream.curriculum.config.band is not None
        }
        self._seed = seed
        total = sum(stream.weight for stream in streams)
        self._shares = {stream.name: stream.weight / total for stream in streams}
        random = np.random.default_rng([seed, _CREDITS_SEED])
        # Random first credits: with equal ones, every run would begin with the same source, whatever its seed.
        self._first_credits = {name: float(random.random() * share) for name, share in self._shares.items()}

    def draw(self, positions: Positions) -> tuple[Problem, Positions]:
        """Return the next problem, and the new positions of all sources.

        A source without a position starts at its beginning. Positions of unknown sources stay unchanged. Raises
        MegarlError if the curriculum skips 10 million problems in one draw.
        """
        current_positions = {name: positions.get(name, Position()) for name in self._streams}
        # At each draw every source gains its share of 1. The source with the largest credit is drawn, and pays 1.
        credits = {
            name: self._shares[name] + (self._first_credits[name] if position.credit is None else position.credit)
            for name, position in current_positions.items()
        }
        # Draw from the source with the largest credit, skipping problems outside the curriculum's band.
        name = max(credits, key=lambda name: credits[name])
        credits[name] -= 1
        stream, position = self._streams[name], current_positions[name]
        num_skipped = self._count_skipped(stream, position)
        stream_index = position.taken + num_skipped
        new_positions = {
            source: Position(current.taken, current.passed, credits[source], current.rates)
            for source, current in current_positions.items()
        }
        new_positions[name] = Position(stream_index + 1, position.passed + num_skipped, credits[name], position.rates)
        return stream.problems[stream.data_position(stream_index)], {**positions, **new_positions}

    def _count_skipped(self, stream: SourceStream, position: Position) -> int:
        """Return how many problems of a source the curriculum skips at `position`, before the problem to draw."""
        # Each source numbers its own problems, so the seeds of equal numbers differ by the source's name.
        source_seed = stream.name.encode() if len(self._streams) > 1 else b""
        num_skipped = 0
        while not stream.curriculum.draws_problem(
            stream.data_position(position.taken + num_skipped),
            position.rates,
            [self._seed, _CURRICULUM_SEED, position.taken + num_skipped, *source_seed],
        ):
            num_skipped += 1
            if num_skipped > _MAX_SKIPPED:
                raise MegarlError(
                    f"data.curriculum: {_MAX_SKIPPED} consecutive problems of {stream.name} were skipped, because "
                    "their solve rates are outside data.curriculum.band; widen the band, or raise "
                    "data.curriculum.outside"
                )
        return num_skipped

    def update_solve_rate(self, positions: Positions, problem: Problem, solve_rate: float) -> Positions:
        """Return the positions after a group of attempts at a problem. `solve_rate` is the group's solved share."""
        stream, position = self._streams[problem.source], positions[problem.source]
        if stream.curriculum.config.band is None:
            return positions
        data_position = self._places[problem.source].get(problem.index)
        assert data_position is not None
        rates = stream.curriculum.update_rates(position.rates, data_position, solve_rate)
        return {**positions, problem.source: Position(position.taken, position.passed, position.credit, rates)}

    def epochs(self, positions: Positions) -> dict[str, float]:
        """Return each source's drawn or skipped problems divided by its size."""
        return {
            name: positions[name].taken / stream.order.num_items
            for name, stream in self._streams.items()
            if name in positions
        }

    def metrics(self, positions: Positions) -> dict[str, dict[str, float]]:
        """Return each source's curriculum metrics, with the number of skipped problems (`skipped`)."""
        source_positions = {name: positions[name] for name in self._streams if name in positions}
        source_metrics = {
            name: self._streams[name].curriculum.metrics(position.rates) for name, position in source_positions.items()
        }
        return {
            name: curriculum_metrics | {"skipped": float(source_positions[name].passed)}
            for name, curriculum_metrics in source_metrics.items()
            if curriculum_metrics
        }
