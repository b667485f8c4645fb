"""Which nodes hold copies of which rank's training state, and which are sent."""

from __future__ import annotations

import pytest

from megarl.reshard.state_holders import hand_overs, partners


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [("a", [0]), ("aa", [0, 1]), ("aabb", [2, 3, 0, 1]), ("aabbcc", [2, 3, 4, 5, 0, 1]), ("aab", [2, 2, 0])],
)
def test_a_copy_goes_to_another_node(nodes: str, expected: list[int]) -> None:
    assert partners([(node,) for node in nodes]) == expected


@pytest.mark.parametrize(
    ("holders", "nodes", "expected"),
    [
        pytest.param({0: "ab", 1: "ab"}, "ab", {}, id="both stay"),
        pytest.param({0: "ab", 1: "ab"}, "b", {}, id="one is left"),
        pytest.param({0: "a", 1: "a", 2: "b"}, "b", {0: "b", 1: "b"}, id="a node leaves"),
        pytest.param({0: "a", 1: "a", 2: "b"}, "bc", {0: "b", 1: "c"}, id="and a new one comes"),
    ],
)
def test_copies_of_a_leaving_node_are_sent(holders: dict[int, str], nodes: str, expected: dict[int, str]) -> None:
    assert hand_overs(holders, nodes) == expected
