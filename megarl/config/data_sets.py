"""Data sets of a recipe: a path, or a path with the names of its records' fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from megarl.config.section import Section

Format = Literal["colossalrl", "rl2", "verl", "trl", "slime", "openrlhf", "alpaca"]
"""Formats of records, named after the writing program (`megarl.data.formats`)."""
Role = Literal["prompt", "answer", "input", "response", "chosen", "rejected", "label", "tools"]
"""Roles of a record's fields (`megarl.data.formats.RecordFormat`)."""

# A union of str and DataSetConfig would report both branches for one mistake; this is one message.
_FORMS = "must be a path, or {path: ..., format: ..., fields: {ROLE: NAME, ...}, answer_field: ...}"


class DataSetConfig(Section):
    """Data set with its own field names. It ignores data.format, data.fields and data.answer_field."""

    path: str
    """Path of the data set, written like data.train."""
    format: Format | None = None
    """Format of this data set, see data.format."""
    fields: dict[Role, str] = Field(default_factory=dict)
    """Names of this data set's fields, see data.fields."""
    answer_field: str | None = None
    """Field of the gold answer, see data.answer_field."""

    @model_validator(mode="after")
    def _one_answer(self) -> Self:
        refuse_two_answers(self.fields, self.answer_field)
        return self

    # Only given fields are written: a default written out would count as given and override `data` on reading.
    @model_serializer(mode="wrap")
    def _short(self, dump: Callable[[Self], dict[str, Any]]) -> str | dict[str, Any]:
        """Serialise as the path alone if nothing else is given, else as the given fields."""
        given = {name: value for name, value in dump(self).items() if name in self.model_fields_set}
        return given if self.has_own_names else self.path

    @property
    def has_own_names(self) -> bool:
        """Return whether any field name is given. A path alone uses the names in `data`."""
        return bool(self.model_fields_set - {"path"})


def refuse_two_answers(fields: Mapping[Role, str], answer_field: str | None) -> None:
    """Raise PydanticCustomError if two different names are given for the gold answer."""
    if answer_field is not None and fields.get("answer", answer_field) != answer_field:
        text = "fields.answer {} and answer_field {} both name the gold answer; remove one"
        raise PydanticCustomError("two_answers", text.format(fields["answer"], answer_field))  # pyright: ignore


def two_answers(values: Any, place: str = "") -> list[tuple[str, Mapping[str, Any]]]:
    """Return the mappings with two different names for the gold answer, each with its dotted name.

    `values`: a recipe's plain values, not validated yet.
    """
    if not isinstance(values, Mapping):
        return []
    found = [pair for name, value in values.items() for pair in two_answers(value, f"{place}.{name}".lstrip("."))]
    fields, alone = values.get("fields"), values.get("answer_field")
    by_role = fields.get("answer") if isinstance(fields, Mapping) else None
    is_double = isinstance(by_role, str) and isinstance(alone, str) and by_role != alone
    return [(place, values), *found] if is_double else found


def path_of(data_set: str | DataSetConfig) -> str:
    """Return the path of a data set."""
    return data_set if isinstance(data_set, str) else data_set.path


def _of_forms(given: Any) -> Any:
    """Return a path unchanged and a mapping as DataSetConfig, so that errors name the mapping's own fields."""
    if isinstance(given, str | DataSetConfig) or given is None:
        return given
    if not isinstance(given, Mapping) or "path" not in given or given.keys() - DataSetConfig.model_fields.keys():
        raise PydanticCustomError("data_set", _FORMS)
    return DataSetConfig.model_validate(given)


DataSet = Annotated[str | DataSetConfig, BeforeValidator(_of_forms)]
OptionalDataSet = Annotated[str | DataSetConfig | None, BeforeValidator(_of_forms)]


def _path_alone(given: Any) -> Any:
    if isinstance(given, Mapping):
        text = "must be a path; the names of its fields are data.format, data.fields and data.answer_field"
        raise PydanticCustomError("training_data", text)
    return given


TrainingData = Annotated[str, BeforeValidator(_path_alone)]
