"""Settings of learning in TensorBoard, read by the code of its HPARAMS tab."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, get_experiment, list_session_groups
from tensorboard.plugins.hparams.backend_context import Context

from megarl.config import Recipe
from megarl.config.recipe import load
from megarl.tracking.display import Display
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.tracker import Tracker

api: Any = api_pb2


def log(runs: Path, name: str, values: dict[int, float], **sections: Any) -> None:
    """A run whose accuracy takes these values by step."""
    given = {"name": name, "loop": "rl", "model": {"path": "m"}, "data": {"train": "t", "validation": {"easy": "v"}}}
    log_recipe(Recipe.model_validate({**given, **sections, "runs_folder": str(runs)}), values)


def log_recipe(recipe: Recipe, values: dict[int, float]) -> None:
    with RunFolder(recipe, resume=True) as folder:
        first = min(values)
        folder.begin(first - 1 or None)
        tracker = Tracker(folder, display=Display(Console(file=io.StringIO())))
        for step, value in values.items():
            tracker.log(step, {"val/easy/accuracy": value, "reward/mean": 2 * value})
        tracker.close()


def tab(runs: Path) -> tuple[Any, list[Any]]:
    """The columns and the rows, sorted by accuracy, of the HPARAMS tab over a folder of runs."""
    multiplexer = EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(runs))
    multiplexer.Reload()
    context = Context(TBContext(data_provider=MultiplexerDataProvider(multiplexer, str(runs))))
    columns = get_experiment.Handler(RequestContext(), context, "", api.GetExperimentRequest()).run()
    request = api.ListSessionGroupsRequest(
        start_index=0,
        slice_size=10,
        allowed_statuses=[api.STATUS_UNKNOWN, api.STATUS_SUCCESS, api.STATUS_FAILURE, api.STATUS_RUNNING],
        col_params=[
            api.ColParams(metric=api.MetricName(tag="val/easy/accuracy"), order=api.ORDER_DESC),
            api.ColParams(hparam="algorithm.advantage"),
        ],
    )
    found = list_session_groups.Handler(RequestContext(), context, "", request).run()
    return columns, list(found.session_groups)


def values(group: Any) -> dict[str, Any]:
    kinds = {name: value.WhichOneof("kind") for name, value in group.hparams.items()}
    return {name: getattr(group.hparams[name], kind) for name, kind in kinds.items() if kind is not None}


def test_the_tab_compares_runs_by_settings_and_metrics(tmp_path: Path) -> None:
    log(tmp_path, "small", {1: 0.25, 2: 0.5}, optimizer={"learning_rate": 1e-6})
    log(tmp_path, "large", {1: 0.25, 2: 0.75}, optimizer={"learning_rate": 1e-5}, algorithm={"advantage": "gae"})
    columns, (first, second) = tab(tmp_path)
    types = {info.name: info.type for info in columns.hparam_infos}
    assert types["optimizer.learning_rate"] == types["train.steps"] == api.DATA_TYPE_FLOAT64
    assert types["algorithm.dual_clip"] == types["critic.clip"] == api.DATA_TYPE_FLOAT64
    assert types["algorithm.whiten_advantages"] == api.DATA_TYPE_BOOL
    assert types["algorithm.advantage"] == types["reward.functions"] == api.DATA_TYPE_STRING
    assert not any(name.startswith(("cluster.", "checkpoint.", "runs_folder")) for name in types)
    assert [info.name.tag for info in columns.metric_infos] == [
        "val/easy/accuracy", "val/easy/reward/mean", "reward/mean", "reward/accuracy"
    ]  # fmt: skip
    assert [session.name for group in (first, second) for session in group.sessions] == [
        "large/tensorboard",
        "small/tensorboard",
    ]
    assert values(first)["optimizer.learning_rate"] == pytest.approx(1e-5)
    assert values(first)["algorithm.advantage"] == "gae" and values(first)["critic.warmup_steps"] == 0
    # A field that does nothing in a run has no value in its row.
    assert "critic.warmup_steps" not in values(second)
    measured = {metric.name.tag: (metric.value, metric.training_step) for metric in first.metric_values}
    assert measured == {"val/easy/accuracy": (0.75, 2), "reward/mean": (1.5, 2)}


def test_what_was_read_from_the_environment_stays_a_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORING_KEY", "a-secret-key")
    monkeypatch.setenv("LEARNING_RATE", "2.0e-6")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "{name: judged, loop: rl, model: {path: m}, data: {train: t, validation: {easy: v}}, "
        f"runs_folder: {tmp_path / 'runs'}, optimizer: {{learning_rate: '${{oc.env:LEARNING_RATE}}'}}, "
        "reward: {functions: [{name: 'f.py:score', kwargs: {api_key: '${oc.env:SCORING_KEY}'}}]}}"
    )
    log_recipe(load(str(recipe)), {1: 0.25})
    _, [row] = tab(tmp_path / "runs")
    assert values(row)["optimizer.learning_rate"] == pytest.approx(2e-6)
    [function] = json.loads(values(row)["reward.functions"])
    assert function["kwargs"] == {"api_key": "${oc.env:SCORING_KEY}"}
    written = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert written and not any(b"a-secret-key" in path.read_bytes() for path in written)


def test_a_resumed_run_is_one_row_with_the_settings_of_its_beginning(tmp_path: Path) -> None:
    log(tmp_path, "run", {1: 0.25, 2: 0.5}, optimizer={"learning_rate": 3e-6})
    log(tmp_path, "run", {2: 0.75, 3: 1.0}, optimizer={"learning_rate": 5e-6})
    _, [row] = tab(tmp_path)
    assert values(row)["optimizer.learning_rate"] == pytest.approx(3e-6)
    assert {metric.training_step for metric in row.metric_values} == {3}
