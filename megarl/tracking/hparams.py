"""Settings of a run for TensorBoard's HPARAMS tab, stored as two summaries in addition to the scalars.

The first summary declares the columns. They are the same for all loops, so all runs share one table. The second has the
values of the run's recipe fields, except fields without effect. For a run resumed with changed settings, TensorBoard
shows the first values.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

from megarl.config import Recipe, Section
from megarl.config.effects import unmet
from megarl.config.recipe import written_value
from megarl.config.schema import value_at

SECTIONS = (
    "loop", "seed", "model.path", "model.dtype", "data.train", "lora", "algorithm", "critic", "preference", "optimizer",
    "train", "rollout.sampling", "reward",
)  # fmt: skip
"""Recipe fields shown as columns. A section stands for all its fields."""

# protobuf creates the message classes at import, so type checkers do not know their fields.
_api: Any = api_pb2
_plugin: Any = plugin_data_pb2
_TYPES = {bool: "DATA_TYPE_BOOL", int: "DATA_TYPE_FLOAT64", float: "DATA_TYPE_FLOAT64"}


def summaries(recipe: Recipe) -> list[Any]:
    """Return the two summaries of a run: the columns with the metrics to compare, and the run's values."""
    fields = dict(_fields(Recipe))
    experiment = _api.Experiment(
        time_created_secs=time.time(),
        hparam_infos=[
            _api.HParamInfo(name=name, type=getattr(_api, _data_type(annotation)))
            for name, annotation in fields.items()
        ],
        metric_infos=[_api.MetricInfo(name=_api.MetricName(tag=tag)) for tag in _metrics(recipe)],
    )
    session = _plugin.SessionStartInfo(start_time_secs=time.time())
    for name in fields:
        value = value_at(recipe, name)
        if value is not None and unmet(recipe, name) is None:
            # Numbers cannot be secrets, and their columns accept only numbers. Other values are written with secrets
            # hidden.
            _set(session.hparams[name], value if isinstance(value, int | float) else written_value(recipe, name))
    return [
        _summary(metadata.EXPERIMENT_TAG, _plugin.HParamsPluginData(experiment=experiment)),
        _summary(metadata.SESSION_START_INFO_TAG, _plugin.HParamsPluginData(session_start_info=session)),
    ]


def ended() -> Any:
    """Return the summary marking the end of a run. The reason of the end is in `status.json`."""
    info = _plugin.SessionEndInfo(status=_api.STATUS_UNKNOWN, end_time_secs=time.time())
    return _summary(metadata.SESSION_END_INFO_TAG, _plugin.HParamsPluginData(session_end_info=info))


def _fields(section: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the recipe fields of the columns by dotted name, each with its type annotation."""
    for own, field in section.model_fields.items():
        name = f"{prefix}{own}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _fields(field.annotation, f"{name}.")
        elif any(name == chosen or name.startswith(f"{chosen}.") for chosen in SECTIONS):
            yield name, field.annotation


def _metrics(recipe: Recipe) -> list[str]:
    """Return the metrics by which the HPARAMS tab compares runs."""
    sets = dict.fromkeys(name for source in recipe.sources for name in source.recipe.data.validation)
    of_loop = ["reward/mean", "reward/accuracy"] if recipe.is_on_policy else ["train/loss"]
    if recipe.loop == "distillation":
        of_loop.insert(0, "distillation/reverse_kl" if recipe.has_advantages else "distillation/divergence")
    # A set without verdicts has a mean reward only.
    measures = ("accuracy", "reward/mean") if recipe.has_engine else ("accuracy",)
    return [*(f"val/{name}/{measure}" for name in sets for measure in measures), *of_loop]


def _data_type(annotation: Any) -> str:
    """Return TensorBoard's data type for a field's annotation."""
    found = {_TYPES.get(kind, "DATA_TYPE_STRING") for kind in _kinds(annotation)}
    # A column with values of several types must be text.
    return found.pop() if len(found) == 1 else "DATA_TYPE_STRING"


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield the types in a field's annotation, without None."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _kinds(arguments[0])
    elif origin in (Union, UnionType):
        for argument in arguments:
            yield from _kinds(argument)
    elif annotation is not NoneType:
        yield annotation


def _set(target: Any, value: Any) -> None:
    """Store a value in a protobuf field of its type."""
    # bool first: Python counts it as an int.
    if isinstance(value, bool):
        target.bool_value = value
    elif isinstance(value, int | float):
        target.number_value = value
    else:
        target.string_value = value if isinstance(value, str) else json.dumps(value)


def _summary(tag: str, content: Any) -> Any:
    """Return a summary with `content` in its metadata, as the HPARAMS plugin expects."""
    value = Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(content), tensor=metadata.NULL_TENSOR)
    return Summary(value=[value])
