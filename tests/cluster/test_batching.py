"""What the ranks are given: whole sets of sequences, no row empty; answers come back in order."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from megarl.cluster.batching import TrainerRanks
from megarl.config.parallel import ParallelConfig
from megarl.types import TrainingSequence


class Ranks:
    """Answers `forward` with each sequence's tokens, negated, and keeps the rows that each rank was given."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.rows: list[list[list[TrainingSequence]]] = []

    async def scatter(self, method: str, per_rank: Any, *args: Any) -> list[Any]:
        assert method == "forward" and args == ("policy",) and len(per_rank) == self.world_size
        self.rows = list(per_rank)
        return [[[-sequence.token_ids for sequence in row] for row in rows] for rows in per_rank]


def sequences(count: int) -> list[TrainingSequence]:
    return [TrainingSequence(np.full(10 + i, i), np.ones(10 + i, bool)) for i in range(count)]


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize(("dp", "vpp"), [(1, 1), (2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("count", [2, 4, 6, 10, 14])
def test_any_number_of_sequences_is_answered(count: int, dp: int, vpp: int, together: int) -> None:
    layout = ParallelConfig(tp=1, pp=2 if vpp > 1 else 1, dp=dp, rollout_tp=1, vpp=vpp)
    ranks = Ranks(layout.world_size)
    trainer = TrainerRanks(ranks, layout, 64, together=together)  # type: ignore[arg-type]
    found = asyncio.run(trainer.forward(sequences(count)))
    assert [values.tolist() for values in found] == [[-i] * (10 + i) for i in range(count)]
    assert len({len(rows) for rows in ranks.rows}) == 1 and len(ranks.rows[0]) % layout.rows_multiple == 0
    for row in (row for rows in ranks.rows for row in rows):
        numbers = [int(sequence.token_ids[0]) for sequence in row]
        assert numbers and sum(map(len, row)) <= 64
        for start in range(0, len(numbers), together):
            first, *others = numbers[start : start + together]
            assert first % together == 0 and others == list(range(first + 1, first + together))
