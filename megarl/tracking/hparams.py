"""A run's settings of learning as TensorBoard's HPARAMS tab takes them: two summaries beside the scalars.

The first declares columns, the same in all runs, so that runs of any loop stand in one table; the second has this run's
values, of the fields that have an effect in it. Of a run that was resumed with others TensorBoard shows those of its
beginning.
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
from megarl.config.effects import unmet, value_at
from megarl.config.recipe import written_value

SECTIONS = (
    "loop", "seed", "model.path", "model.dtype", "data.train", "lora", "algorithm", "critic", "preference", "optimizer",
    "train", "rollout.sampling", "reward",
)  # fmt: skip
"""The fields, and sections whose fields all, are columns."""

# The messages' fields are made by protobuf when they are imported.
_api: Any = api_pb2
_plugin: Any = plugin_data_pb2
_TYPES = {bool: "DATA_TYPE_BOOL", int: "DATA_TYPE_FLOAT64", float: "DATA_TYPE_FLOAT64"}


def summaries(recipe: Recipe) -> list[Any]:
    """The summaries of a run: its columns, with the metrics that runs are compared by, and its values."""
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
            # A number by itself is no secret, and its column takes only numbers.
            _set(session.hparams[name], value if isinstance(value, int | float) else written_value(recipe, name))
    return [
        _summary(metadata.EXPERIMENT_TAG, _plugin.HParamsPluginData(experiment=experiment)),
        _summary(metadata.SESSION_START_INFO_TAG, _plugin.HParamsPluginData(session_start_info=session)),
    ]


def ended() -> Any:
    """The summary of a run that is no longer under way; `status.json` says how it ended."""
    info = _plugin.SessionEndInfo(status=_api.STATUS_UNKNOWN, end_time_secs=time.time())
    return _summary(metadata.SESSION_END_INFO_TAG, _plugin.HParamsPluginData(session_end_info=info))


def _fields(section: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The columns by dotted name, with their annotations."""
    for own, field in section.model_fields.items():
        name = f"{prefix}{own}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _fields(field.annotation, f"{name}.")
        elif any(name == chosen or name.startswith(f"{chosen}.") for chosen in SECTIONS):
            yield name, field.annotation


def _metrics(recipe: Recipe) -> list[str]:
    """The metrics that runs are compared by."""
    sets = dict.fromkeys(name for source in recipe.sources for name in source.recipe.data.validation)
    of_loop = ["reward/mean", "reward/accuracy"] if recipe.is_on_policy else ["train/loss"]
    if recipe.loop == "distillation":
        of_loop.insert(0, "distillation/reverse_kl" if recipe.has_advantages else "distillation/divergence")
    return [*(f"val/{name}/accuracy" for name in sets), *of_loop]


def _data_type(annotation: Any) -> str:
    found = {_TYPES.get(kind, "DATA_TYPE_STRING") for kind in _kinds(annotation)}
    return found.pop() if len(found) == 1 else "DATA_TYPE_STRING"


def _kinds(annotation: Any) -> Iterator[Any]:
    """The types of a field's values, None left out."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _kinds(arguments[0])
    elif origin in (Union, UnionType):
        for argument in arguments:
            yield from _kinds(argument)
    elif annotation is not NoneType:
        yield annotation


def _set(target: Any, value: Any) -> None:
    if isinstance(value, bool):
        target.bool_value = value
    elif isinstance(value, int | float):
        target.number_value = value
    else:
        target.string_value = value if isinstance(value, str) else json.dumps(value)


def _summary(tag: str, content: Any) -> Any:
    value = Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(content), tensor=metadata.NULL_TENSOR)
    return Summary(value=[value])
