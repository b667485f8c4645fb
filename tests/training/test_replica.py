"""Rows that the first rank of each replica has reach the others of it, and no other replica."""

from __future__ import annotations

import numpy as np
import pytest
import torch.distributed as dist

from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.types import TrainingSequence
from tests.rank_pool import RankPool


def rows_of(replica: int, length: int) -> list[TokenBatch]:
    """Two rows whose tokens name the replica; the second has two sequences."""
    ids = np.arange(length) + 1000 * replica
    one = TrainingSequence(ids, np.arange(length) > 2, advantages=(ids / 7).astype(np.float32))
    row = TokenBatch.from_sequences([one, one])
    return [row.select([0]), row]


def shared(parallel: ParallelConfig, lengths: tuple[int, ...]) -> list[list[TokenBatch]]:
    """Broadcast rows of these lengths one after the other, and return what this rank receives."""
    from megarl.training.replica import Replica

    replica = Replica(parallel)
    at = parallel.coordinates(dist.get_rank())
    is_first = (at.tp, at.pp, at.cp) == (0, 0, 0)
    found = [list(replica.share_rows(rows_of(at.dp, length) if is_first else None)) for length in lengths]
    replica.close()
    return found


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(ParallelConfig(1, 1, 4, 1), id="dp4"),
        pytest.param(ParallelConfig(2, 1, 2, 1), id="tp2 dp2"),
        pytest.param(ParallelConfig(1, 2, 2, 1, vpp=2), id="pp2 vpp2 dp2"),
        pytest.param(ParallelConfig(1, 1, 2, 1, cp=2, rank_permutation=(2, 2)), id="cp2 dp2, permuted"),
        pytest.param(ParallelConfig(2, 2, 1, 1), id="tp2 pp2"),
    ],
)
def test_all_ranks_of_a_replica_get_its_rows(ranks: RankPool, parallel: ParallelConfig) -> None:
    # The last is longer than the first block of a broadcast.
    lengths = 3, 50, 60_000
    for rank, found in enumerate(ranks.run(shared, parallel, lengths, world_size=parallel.world_size)):
        for length, rows in zip(lengths, found, strict=True):
            expected = rows_of(parallel.coordinates(rank).dp, length)
            assert len(rows) == 2
            for row, theirs in zip(rows, expected, strict=True):
                for name in ("token_ids", "loss_mask", "cu_seqlens", "samples"):
                    assert np.array_equal(getattr(row, name), getattr(theirs, name)), name
                assert np.array_equal(row.per_token["advantages"], theirs.per_token["advantages"])
