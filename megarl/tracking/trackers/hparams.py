"""Settings of a run for TensorBoard's HPARAMS tab: two summaries, stored by TensorBoard's own functions.

The first declares the columns, equal for all loops, so that all runs share a table. The second has the run's recipe
fields, without those that have no effect. If a run is resumed with other settings, TensorBoard shows the first ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NoReturn, Union, get_args, get_origin

from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2, summary_v2

from megarl.config import Recipe, Section
from megarl.config.effects import unmet
from megarl.config.recipe import written_value
from megarl.config.schema import value_at

SECTIONS = (
    "loop", "seed", "model.path", "model.dtype", "data.train", "lora", "algorithm", "critic", "preference", "optimizer",
    "train", "rollout.sampling", "reward",
)  # fmt: skip
"""Recipe fields shown as columns. A section stands for its fields."""

# protobuf creates its message classes at import, so type checkers do not know their fields.
_api: Any = api_pb2
_plugin: Any = plugin_data_pb2
_TYPES = {bool: bool, int: float, float: float}


class _Column(summary_v2.Domain):
    """Type of a column without limits. TensorBoard's own types need limits."""

    def __init__(self, dtype: type) -> None:
        self._dtype = dtype

    @property
    def dtype(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._dtype

    def sample_uniform(self, rng: Any = None) -> NoReturn:
        raise NotImplementedError

    def update_hparam_info(self, hparam_info: Any) -> None:
        types = {bool: _api.DATA_TYPE_BOOL, float: _api.DATA_TYPE_FLOAT64, str: _api.DATA_TYPE_STRING}
        hparam_info.type = types[self._dtype]


def summaries(recipe: Recipe) -> list[Any]:
    """Return a run's two summaries: the columns with the metrics to compare, and the run's values."""
    fields = dict(_list_fields(Recipe))
    columns = [summary_v2.HParam(name, _Column(_column_type(annotation))) for name, annotation in fields.items()]
    metrics = [summary_v2.Metric(tag) for tag in _metrics(recipe)]
    values = {name: value_at(recipe, name) for name in fields if unmet(recipe, name) is None}
    accepted_values = {name: _scalar(recipe, name, value) for name, value in values.items() if value is not None}
    run = str(Path(recipe.runs_folder, recipe.name))
    return [
        summary_v2.hparams_config_pb(columns, metrics, time_created_secs=time.time()),
        summary_v2.hparams_pb(accepted_values, trial_id=run),
    ]


def end_summary() -> Any:
    """Return the summary that marks the end of a run. `status.json` has the reason."""
    # TensorBoard's own function, `summary.session_end_pb`, needs TensorFlow.
    info = _plugin.SessionEndInfo(status=_api.STATUS_UNKNOWN, end_time_secs=time.time())
    content = metadata.create_summary_metadata(_plugin.HParamsPluginData(session_end_info=info))
    value = Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=content, tensor=metadata.NULL_TENSOR)
    return Summary(value=[value])


def _list_fields(section: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field_name, field in section.model_fields.items():
        name = f"{prefix}{field_name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _list_fields(field.annotation, f"{name}.")
        elif any(name == section_name or name.startswith(f"{section_name}.") for section_name in SECTIONS):
            yield name, field.annotation


def _metrics(recipe: Recipe) -> list[str]:
    """Return the metrics by which the HPARAMS tab compares runs."""
    sets = dict.fromkeys(name for source in recipe.sources for name in source.recipe.data.validation)
    loop_metrics = ["reward/mean", "reward/accuracy"] if recipe.is_on_policy else ["train/loss"]
    if recipe.loop == "distillation":
        loop_metrics.insert(0, "distillation/reverse_kl" if recipe.has_advantages else "distillation/divergence")
    # Without verdicts, a set has only a mean reward.
    measures = ("accuracy", "reward/mean") if recipe.has_engine else ("accuracy",)
    return [*(f"val/{name}/{measure}" for name in sets for measure in measures), *loop_metrics]


def _column_type(annotation: Any) -> type:
    types = {_TYPES.get(kind, str) for kind in _plain_types(annotation)}
    # A column of mixed types must be text.
    return types.pop() if len(types) == 1 else str


def _plain_types(annotation: Any) -> Iterator[Any]:
    """Yield the types in an annotation. Unions are split, and None is left out."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _plain_types(arguments[0])
    elif origin in (Union, UnionType):
        for member in arguments:
            yield from _plain_types(member)
    elif annotation is not NoneType:
        yield annotation


def _scalar(recipe: Recipe, name: str, value: Any) -> bool | float | str:
    """Return a field's value as TensorBoard accepts it, with secrets hidden."""
    # Numbers cannot be secrets, and their columns accept only numbers.
    if isinstance(value, int | float):
        return value
    text = written_value(recipe, name)
    return text if isinstance(text, str) else json.dumps(text)
