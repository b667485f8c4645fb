"""Requests for other parallel sizes of a running run, and the layout of the ranks that a loss leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config import Recipe
from megarl.loops.ranks.resizing import can_grow, change_sizes, request_resize, shrink_to, take_request
from megarl.preflight import check
from megarl.types import ConfigError, DataError
from tests.preflight.conftest import recipe as recipe


@pytest.mark.parametrize(
    ("trainer", "survivors", "size", "chosen"),
    [
        pytest.param({}, [0, 1, 3], 2, [0, 1], id="dp 3 does not divide the batch"),
        pytest.param({}, [2, 3], 2, [2, 3], id="dp 2"),
        pytest.param({"tp": 2}, [0, 2, 3], 2, [2, 3], id="the whole replica stays"),
        pytest.param({"tp": 2}, [1, 2], 2, [1, 2], id="parts of two replicas"),
        pytest.param({"pp": 2, "dp": 2}, [0, 2, 3], 2, [0, 2], id="pp, with trainer.dp"),
    ],
)
def test_survivors_form_whole_replicas(
    recipe: Callable[..., Recipe], trainer: dict[str, int], survivors: list[int], size: int, chosen: list[int]
) -> None:
    made = recipe(cluster={"ranks_per_node": 4}, trainer=trainer)
    parallel = check(made)
    changed, smaller, continuing = shrink_to(made, parallel, survivors)
    assert continuing == chosen and changed.cluster.ranks_per_node == smaller.world_size == size
    assert (smaller.tp, smaller.pp) == (parallel.tp, parallel.pp) and smaller.dp == size // (parallel.tp * parallel.pp)


def test_too_few_survivors_are_refused(recipe: Callable[..., Recipe]) -> None:
    made = recipe(cluster={"ranks_per_node": 4}, trainer={"tp": 2})
    with pytest.raises(
        ConfigError, match=r"^cluster.recover = shrink: 1 processes are left, but one data-parallel replica needs 2;"
    ):
        shrink_to(made, check(made), [3])


def test_a_request_is_taken_once(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    made = recipe(cluster={"ranks_per_node": 2})
    assert take_request(tmp_path, made) is None
    request_resize(tmp_path, {"cluster.ranks_per_node": 4, "trainer.tp": 2})
    asked = take_request(tmp_path, made)
    assert asked is not None and (asked.parallel.tp, asked.parallel.dp) == (2, 2)
    assert asked.recipe.cluster.ranks_per_node == 4 and made.cluster.ranks_per_node == 2
    assert list(tmp_path.glob("resize*")) == [] and take_request(tmp_path, made) is None


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ('{"trainer.tp": 3}', ConfigError, "trainer.tp = 3"),
        ('{"train.steps": 3}', DataError, "train.steps is not a field that a resize can change"),
        ('{"trainer.tp": "2"}', DataError, 'trainer.tp = "2" is not a whole number from 1'),
        ('{"trainer.tp": 0}', DataError, "trainer.tp = 0 is not a whole number from 1"),
        ('{"trainer.tp": null}', DataError, "trainer.tp = null is not a whole number from 1"),
        ('{"cluster.nodes": null}', DataError, "cluster.nodes = null is not a whole number from 1"),
        ('{"cluster.nodes": 1e3}', DataError, "cluster.nodes = 1000.0 is not a whole number from 1"),
        ('{"cluster.nodes": 1000000000}', DataError, "cluster.nodes = 1000000000 is not a whole number from 1"),
        ('{"trainer.tp": 1}', ConfigError, "has these sizes already"),
        ('{"trainer.dp": null}', ConfigError, "has these sizes already"),
        ("{}", ConfigError, "has these sizes already"),
        ('{"trainer.tp": ', DataError, "resize"),
    ],
)
def test_a_refused_request_is_removed(
    recipe: Callable[..., Recipe], tmp_path: Path, text: str, kind: type[Exception], message: str
) -> None:
    (tmp_path / "resize.json").write_text(text)
    with pytest.raises(kind, match=message):
        take_request(tmp_path, recipe())
    assert list(tmp_path.glob("resize*")) == []


def test_of_two_requests_the_second_is_refused(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    made = recipe(cluster={"ranks_per_node": 2})
    request_resize(tmp_path, {"trainer.tp": 2})
    with pytest.raises(ConfigError, match=r"resize\.json: another change waits"):
        request_resize(tmp_path, {"cluster.ranks_per_node": 4})
    assert [path.name for path in tmp_path.glob("*resize*")] == ["resize.json"]
    asked = take_request(tmp_path, made)
    assert asked is not None and (asked.parallel.tp, asked.parallel.world_size) == (2, 2)


def test_other_fields_are_not_asked_for(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^optimizer.learning_rate: a resize cannot change it; it can change cluster"
    ):
        request_resize(tmp_path, {"optimizer.learning_rate": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_a_run_whose_copies_lack_a_part_is_refused(recipe: Callable[..., Recipe]) -> None:
    made = recipe(trainer={"router_replay": True})
    with pytest.raises(ConfigError, match=r"trainer\.router_replay = true"):
        change_sizes(made, json.loads('{"trainer.tp": 1}'))


def test_a_run_with_recorded_experts_shrinks_from_a_checkpoint_and_does_not_grow(
    recipe: Callable[..., Recipe], tiny_model: Callable[..., Path]
) -> None:
    """Growth continues from copies in memory, which lack the experts. A checkpoint has them."""
    model = {"path": str(tiny_model(family="qwen3_moe"))}
    made = recipe(model=model, trainer={"router_replay": True}, cluster={"ranks_per_node": 2, "recover": "shrink"})
    changed, parallel, chosen = shrink_to(made, check(made), [1])
    assert (changed.cluster.ranks_per_node, parallel.dp, chosen) == (1, 1, [1])
    on_slurm = {"launcher": "slurm", "ranks_per_node": 2, "recover": "shrink"}
    assert can_grow(recipe(cluster=on_slurm)) and not can_grow(recipe(cluster={"recover": "shrink"}))
    assert not can_grow(recipe(cluster=on_slurm, trainer={"router_replay": True}))


def test_a_job_has_more_nodes_than_a_run_that_became_smaller(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    monkeypatch.setattr("shutil.which", lambda name: name)
    made = recipe(cluster={"launcher": "slurm", "nodes": 2, "ranks_per_node": 2, "recover": "shrink"})
    changed, parallel, chosen = shrink_to(made, check(made), [2, 3])
    assert (changed.cluster.nodes, changed.cluster.ranks_per_node) == (1, 2)
    assert parallel.dp == 2 and chosen == [2, 3]
