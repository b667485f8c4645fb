"""Not collected by itself: of its tests, one needs a Slurm that is not there and one starts ranks."""

import pytest

from megarl.testing import RankPool


@pytest.mark.skipif(True, reason="needs Slurm and munge")
def test_of_slurm() -> None:
    raise AssertionError


def test_of_ranks() -> None:
    RankPool(1).close()


@pytest.mark.end_to_end
def test_that_says_so() -> None:
    RankPool(1).close()


def test_of_nothing() -> None:
    pass
