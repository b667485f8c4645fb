"""Seconds of a step's phases that are typed in."""

from __future__ import annotations

import pytest

from megarl.planner.seconds.step import moved_seconds


@pytest.mark.parametrize(
    ("link", "memory", "seconds"),
    [
        pytest.param(50.0, 1e9, 2.0, id="the link is slower"),
        pytest.param(1e9, 50.0, 4.0, id="the memory is slower: bytes are read and written"),
    ],
)
def test_a_reshard_takes_the_time_of_its_slower_part(link: float, memory: float, seconds: float) -> None:
    assert moved_seconds(100.0, link=link, memory=memory) == seconds
