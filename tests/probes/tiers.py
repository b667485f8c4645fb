"""Tests of every tier, for tests of the tiers: one needs Slurm, one starts ranks although it is of the fast tier."""

import pytest

from tests.rank_pool import RankPool


def answer() -> int:
    return 7


@pytest.mark.cluster
@pytest.mark.slurm
@pytest.mark.skipif(True, reason="needs Slurm and munge")
def test_needs_slurm() -> None:
    raise AssertionError


def test_uses_ranks(ranks: RankPool) -> None:
    assert ranks.run(answer, world_size=1)


@pytest.mark.end_to_end
def test_is_marked() -> None:
    pass


@pytest.mark.long
def test_takes_minutes() -> None:
    pass


def test_has_neither() -> None:
    pass


def test_starts_ranks_without_a_marker() -> None:
    with RankPool(1) as pool:
        pool.run(answer)
