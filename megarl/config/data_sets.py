"""Data sets of a recipe: a path, or a path with names of its records' fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from megarl.config.section import Section

Format = Literal["colossalrl", "rl2", "verl", "trl", "slime", "openrlhf", "alpaca"]
"""Formats of records, by the program that writes them (`megarl.data.formats`)."""
Role = Literal["prompt", "answer", "input", "response", "chosen", "rejected", "label", "tools"]
"""Roles of a record's fields (`megarl.data.formats.RecordFormat`)."""

_FORMS = "must be a path, or {path: ..., format: ..., fields: {ROLE: NAME, ...}, answer_field: ...}"


class DataSetConfig(Section):
    """A data set whose fields have names of their own. Then none of data.format, fields and answer_field holds."""

    path: str
    """As data.train."""
    format: Format | None = None
    """As data.format."""
    fields: dict[Role, str] = Field(default_factory=dict)
    """As data.fields."""
    answer_field: str | None = None
    """As data.answer_field."""

    @model_validator(mode="after")
    def _one_answer(self) -> Self:
        refuse_two_answers(self.fields, self.answer_field)
        return self

    @model_serializer(mode="wrap")
    def _short(self, dump: Callable[[Self], dict[str, Any]]) -> str | dict[str, Any]:
        """The path where that says all; else what is given, since a name that is not has a meaning of its own."""
        given = {name: value for name, value in dump(self).items() if name in self.model_fields_set}
        return given if self.has_own_names else self.path

    @property
    def has_own_names(self) -> bool:
        """Whether it gives any name: with a path alone, it has those of `data`."""
        return bool(self.model_fields_set - {"path"})


def refuse_two_answers(fields: Mapping[Role, str], answer_field: str | None) -> None:
    """Raise PydanticCustomError where two names are given for the gold answer."""
    if answer_field is not None and fields.get("answer", answer_field) != answer_field:
        text = "fields.answer {} and answer_field {} both name the gold answer; leave one out"
        raise PydanticCustomError("two_answers", text.format(fields["answer"], answer_field))  # pyright: ignore


def path_of(data_set: str | DataSetConfig) -> str:
    """The path of a data set."""
    return data_set if isinstance(data_set, str) else data_set.path


def _of_forms(given: Any) -> Any:
    """A path as it is, an object as a DataSetConfig; so errors of an object stand at its fields."""
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
