"""Which ranks hold copies of which rank's training state."""

from __future__ import annotations

import pytest

from megarl.reshard.state_holders import partners


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [("a", [0]), ("aa", [1, 0]), ("aabb", [2, 3, 0, 1]), ("aabbcc", [2, 3, 4, 5, 0, 1]), ("aab", [2, 2, 0])],
)
def test_a_copy_goes_to_another_node(nodes: str, expected: list[int]) -> None:
    assert partners([(node,) for node in nodes]) == expected
