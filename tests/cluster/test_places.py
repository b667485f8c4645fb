"""Places of processes that join a run: those of lost ones, free ones near the others, none of another group's."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.cluster.places import choose_places

MANY = 1 << 62
"""More places than any group needs: all ranks are on one machine."""


@pytest.mark.parametrize(
    ("world_size", "held", "given", "found"),
    [
        pytest.param(3, {}, {"first": 2}, [2, 3, 4], id="a new group"),
        pytest.param(3, {0: 4, 2: 1}, {"before": [4, 7, 1]}, [7], id="the place of the lost process"),
        pytest.param(3, {0: 4, 1: 7}, {"before": [4, 7, 4]}, [5], id="another one, if an heir has it"),
        pytest.param(4, {0: 0, 1: 1}, {"before": [0, 1]}, [2, 3], id="growth"),
        pytest.param(4, {0: 0, 1: 1}, {"before": [0, 1], "taken": {2, 3}}, [4, 5], id="growth next to engines"),
        pytest.param(
            3, {0: 0, 1: 1}, {"before": [0, 1], "taken": {2, 3}, "silent_nodes": {1}}, [8], id="not on a silent node"
        ),
        pytest.param(2, {}, {"first": 4, "taken": {0, 4, 5, 6}}, [1, 2], id="free places of one node"),
        pytest.param(2, {}, {"first": 4, "taken": {0, 1, 2, 4}}, [5, 6], id="not two nodes for an engine"),
        pytest.param(2, {}, {"first": 4, "taken": {0, 4}, "per_node": MANY, "num_nodes": 1}, [1, 2], id="one machine"),
        pytest.param(6, {}, {"first": 0, "taken": {1}}, [0, 2, 3, 4, 5, 6], id="several nodes"),
        pytest.param(2, {}, {"taken": {0, 1, 2, 4, 5, 6}}, [3, 7], id="two nodes, if none has room"),
        pytest.param(2, {}, {"first": 4, "before": [2, 3], "taken": {4, 5}}, [2, 3], id="an engine started again"),
    ],
)
def test_places(world_size: int, held: dict[int, int], given: dict[str, Any], found: list[int]) -> None:
    settings = {"before": (), "first": 0, "per_node": 4, "num_nodes": 2, "taken": set(), **given}
    assert choose_places(world_size, held, **settings) == found
