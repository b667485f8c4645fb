"""Which recipes need the trainer's log-probs in a pass before their updates."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config import Recipe
from megarl.rollout.step.scoring import corrects_in_update


def recipe_of(correction: str | None, **sections: dict[str, Any]) -> Recipe:
    algorithm = {"importance_sampling": correction, **sections.pop("algorithm", {})}
    return Recipe.model_validate(
        {"name": "x", "loop": "rl", "model": {"path": "m"}, "data": {"train": "d"}, "algorithm": algorithm, **sections}
    )


TURNS = {"environment": "calculator", "max_turns": 3}
SEPARATE = {"placement": "separate", "ranks": 1, "max_staleness": 1}


@pytest.mark.parametrize(
    ("correction", "sections", "expected"),
    [
        pytest.param(None, {}, False, id="no correction"),
        pytest.param("tis", {}, True, id="of tokens"),
        pytest.param("sequence_mask", {}, True, id="of samples in one segment"),
        pytest.param("tis", {"rollout": TURNS}, True, id="of tokens, in turns"),
        pytest.param("sequence_mask", {"rollout": TURNS}, False, id="of samples in several segments"),
        pytest.param("tis", {"rollout": SEPARATE, "cluster": {"ranks_per_node": 2}}, False, id="of stale groups"),
        pytest.param("tis", {"algorithm": {"entropy_top_share": 0.2}}, False, id="below an entropy filter"),
        pytest.param("tis", {"algorithm": {"clip_cov_share": 0.2}}, False, id="below a choice by covariance"),
    ],
)
def test_a_correction_is_made_in_the_update_where_that_is_exact(
    correction: str | None, sections: dict[str, Any], expected: bool
) -> None:
    assert corrects_in_update(recipe_of(correction, **sections)) is expected
