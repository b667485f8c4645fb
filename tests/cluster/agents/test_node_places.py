"""Places of ranks on the nodes of a run: the first free ones, those of one node, and none where they lack."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.agents.nodes import Nodes
from megarl.cluster.launchers.local import LocalNodes
from megarl.types import PeerLostError
from tests.cluster.spawned import SpawnedNodes


def add_agents(nodes: Nodes, lost: Sequence[bool]) -> Any:
    """Give nodes agents without processes, of which some are lost."""
    agents: Any = [SimpleNamespace(is_lost=is_lost) for is_lost in lost]
    nodes.agents = agents
    return nodes


def place_numbers(nodes: Nodes, num_ranks: int, taken: set[tuple[int, int]], *, on_one_node: bool) -> list[Any]:
    """Return node number and local rank of each chosen place."""
    places = nodes.choose_places(num_ranks, taken, on_one_node=on_one_node)
    assert all(place.agent is nodes.agents[place.node_number] for place in places)
    return [(place.node_number, place.local_rank) for place in places]


@pytest.mark.parametrize(
    ("num_ranks", "taken", "on_one_node", "expected"),
    [
        pytest.param(3, set(), False, [(0, 0), (0, 1), (0, 2)], id="the first ones"),
        pytest.param(6, {(0, 1)}, False, [(0, 0), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2)], id="of several nodes"),
        pytest.param(2, {(0, 2), (0, 0)}, False, [(0, 1), (0, 3)], id="free ones between those of others"),
        pytest.param(2, {(0, 0), (0, 1), (0, 2)}, True, [(1, 0), (1, 1)], id="not two nodes for an engine"),
        pytest.param(2, {(0, 0), (0, 1), (0, 2)}, False, [(0, 3), (1, 0)], id="two nodes for trainers"),
        pytest.param(2, {(0, 0), (1, 0)}, True, [(0, 1), (0, 2)], id="the first node, if it has room"),
        pytest.param(
            2, {(n, r) for n in (0, 1) for r in (0, 1, 2)}, True, [(0, 3), (1, 3)], id="two nodes, if none has room"
        ),
        pytest.param(8, set(), True, [(n, r) for n in (0, 1) for r in range(4)], id="more than a node has"),
        pytest.param(0, set(), True, [], id="none"),
    ],
)
def test_places(
    num_ranks: int, taken: set[tuple[int, int]], on_one_node: bool, expected: list[tuple[int, int]]
) -> None:
    nodes = add_agents(SpawnedNodes(2, 4), [False, False])
    assert place_numbers(nodes, num_ranks, taken, on_one_node=on_one_node) == expected


def test_lost_nodes_have_no_places() -> None:
    nodes = add_agents(SpawnedNodes(3, 2), [False, True, False])
    assert place_numbers(nodes, 4, set(), on_one_node=False) == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert place_numbers(nodes, 2, {(0, 0)}, on_one_node=True) == [(2, 0), (2, 1)]


def test_too_few_places_are_counted() -> None:
    nodes = add_agents(SpawnedNodes(3, 2), [False, True, False])
    with pytest.raises(PeerLostError, match="5 ranks need a place, and the 2 living nodes have 3 free ones"):
        nodes.choose_places(5, {(0, 1), (1, 0)}, on_one_node=False)


def test_this_machine_has_any_number_of_places() -> None:
    nodes = add_agents(LocalNodes({}, ()), [False])
    assert place_numbers(nodes, 3, {(0, 0), (0, 2)}, on_one_node=True) == [(0, 1), (0, 3), (0, 4)]
