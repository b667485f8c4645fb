"""Recoveries from lost ranks that a run could not make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.preflight.recovery import check_recovery, check_replication

SEPARATE = {"rollout": {"placement": "separate", "ranks": 1}}
REPLAYED = {"trainer": {"router_replay": True}}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        pytest.param({"cluster": {"recover": "stop", "launcher": "slurm"}}, None, id="stop"),
        pytest.param({"cluster": {"recover": "restart"}, **SEPARATE}, None, id="restart"),
        pytest.param({"cluster": {"recover": "restart", "launcher": "slurm", "spare_nodes": 1}}, None, id="spare"),
        pytest.param({"cluster": {"recover": "restart", "launcher": "ray"}}, None, id="ray"),
        pytest.param({"cluster": {"recover": "shrink", "launcher": "slurm"}}, None, id="shrink on slurm"),
        pytest.param(
            {"cluster": {"recover": "restart", "spare_nodes": 1}},
            "cluster.spare_nodes = 1: spare nodes need cluster.recover=restart and cluster.launcher=slurm",
            id="spare alone",
        ),
        pytest.param({"cluster": {"recover": "shrink"}, **SEPARATE}, None, id="separate engines shrink"),
        # A checkpoint holds the recorded experts, for any number of ranks.
        pytest.param({"cluster": {"recover": "shrink"}, **REPLAYED}, None, id="experts of a checkpoint"),
        pytest.param(
            {"checkpoint": {"replicate": 2}, **REPLAYED},
            "checkpoint.replicate = 2: copies in host memory do not hold the experts",
            id="copied experts",
        ),
    ],
)
def test_recoveries_that_cannot_be_made_are_refused(
    recipe: Callable[..., Recipe], changed: dict[str, Any], message: str | None
) -> None:
    made = recipe(**changed)
    found = [*check_recovery(made), *check_replication(made)]
    assert len(found) == (message is not None)
    assert message is None or (found[0].startswith(message) and "; set " in found[0])
