"""Records of data sources (lines or rows), checked one by one. Every error names the file and the line or row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megarl.data.formats import (
    FORMATS,
    FieldNames,
    RecordFormat,
    first_name_with_value,
    missing_roles,
    missing_text,
    value_at,
)
from megarl.data.rows import Row, data_files, rows_of
from megarl.data.tool_records import standard_tools, with_standard_calls
from megarl.files.strict_json import shown
from megarl.types import DataError

ROLES = ("system", "user", "assistant", "tool")
_ROLES_ELSEWHERE = {"human": "user", "gpt": "assistant"}
"""Usual role names of messages, keyed by the names in ShareGPT data."""

_BY_FORMAT = FieldNames()
"""Field names for a recipe without any: the format is recognised from the first record."""

Made = TypeVar("Made")


class TooLongError(DataError):
    """A record has more tokens than the recipe allows."""


@dataclass(frozen=True, slots=True)
class Record:
    """One line or row of a data file: its place, its fields, and its format (the meaning of its fields)."""

    path: Path
    line: int
    fields: Mapping[str, Any]
    format: RecordFormat = FORMATS["colossalrl"]
    unit: str = "line"
    """Word for what `line` counts: lines of a text file, rows of a table, or records of a JSON list."""
    names: FieldNames = _BY_FORMAT
    """Field names in the recipe, for the remedy in an error."""

    def error(self, problem: str, kind: type[DataError] = DataError) -> DataError:
        """Return a DataError whose message begins with the file and the line."""
        return kind(f"{self.path}, {self.unit} {self.line}: {problem}")

    def value(self, names: tuple[str, ...]) -> Any:
        """Return the value of the first of these fields in the record, or None."""
        return next((found for name in names if (found := value_at(self.fields, name)) is not None), None)

    def field(self, names: tuple[str, ...]) -> str:
        """Return the first of these field names in the record, else the first name."""
        return first_name_with_value(self.fields, names) or names[0]

    def require(self, *roles: str, also: Sequence[str] = ()) -> None:
        """Raise a DataError that lists each of these roles for which the record has no field.

        If a role is missing, the error also lists the missing roles among `also`, which are optional.
        """
        if missing_roles(self.fields, self.format, roles):
            missing = missing_roles(self.fields, self.format, (*also, *roles))
            raise self.error(missing_text(self.fields, self.format, self.names, missing))

    def answer(self) -> Any:
        """Return the record's gold answer: text (also for a number), or a JSON object or list.

        Raises DataError for null, true, false, and empty values.
        """
        self.require("answer")
        field = self.field(self.format.answer)
        value = value_at(self.fields, field)
        # Refuse true and false: str() would turn them into the answers "True" and "False".
        if value is None or isinstance(value, bool):
            raise self.error(f"'{field}' is {shown(value)}; give the answer as a string")
        if isinstance(value, dict | list):
            if not value:
                raise self.error(f"'{field}' is {shown(value)}; give the answer, or remove the line")
            return value
        if not (text := str(value)).strip():
            raise self.error(f"'{field}' is empty; give the answer, or remove the line")
        return text

    def prompt(self, system_prompt: str | None = None) -> tuple[Mapping[str, Any], ...]:
        """Return the conversation to be answered, from a text, one message, or a list of messages."""
        self.require("prompt")
        field = self.field(self.format.prompt)
        # A field named `messages` never holds a plain text; all other fields may.
        return self.messages(system_prompt, field=field, role=None if field == "messages" else "user")

    def messages(
        self, system_prompt: str | None = None, *, field: str | None = None, role: str | None = None
    ) -> tuple[Mapping[str, Any], ...]:
        """Return the conversation in a field (default `messages`), from one message or a list of messages.

        With `role`, a text stands for a message of this role. If the format has an `input` field, its text is appended
        to the prompt. `system_prompt` comes first, unless the conversation has a system message.
        """
        field = field or "messages"
        value = value_at(self.fields, field)
        if field in self.format.prompt:
            value = self._with_input(field, value)
        if role and isinstance(value, str) and value.strip():
            value = {"role": role, "content": value}
        if isinstance(value, Mapping):
            value = [value]
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            raise self.error(
                f"'{field}' is {'missing' if value is None else shown(value)}; give "
                f'{"a text, " if role else ""}one message {{"role": "user", "content": "..."}} or a list of them'
            )
        value = [
            self._with_standard_calls(f"{field}[{place}]", _with_standard_names(message))
            for place, message in enumerate(value)
        ]
        for place, message in enumerate(value):
            self._check_message(f"{field}[{place}]", message, is_first=place == 0)
        if system_prompt is not None and value[0]["role"] != "system":
            value = [{"role": "system", "content": system_prompt}, *value]
        return tuple(value)

    def _with_input(self, field: str, prompt: Any) -> Any:
        """Return the prompt with the text of the format's `input` field appended, if the record has one."""
        for name in self.format.unread:
            if value_at(self.fields, name):
                raise self.error(
                    f"'{name}' is {shown(value_at(self.fields, name))}; it is not read in records of the format "
                    f"{self.format.name}; give the conversation in 'messages', or name the format in data.format"
                )
        added = self.value(self.format.input)
        if added is None or (isinstance(added, str) and not added.strip()):
            return prompt
        if not isinstance(prompt, str) or not isinstance(added, str):
            raise self.error(
                f"'{field}' is {shown(prompt)} and '{self.field(self.format.input)}' is {shown(added)}; give texts, or "
                "the conversation in 'messages'"
            )
        return f"{prompt}\n\n{added}" if prompt.strip() else prompt

    def _check_message(self, place: str, message: Any, *, is_first: bool) -> None:
        if not isinstance(message, Mapping):
            raise self.error(f"{place} is {shown(message)}; give an object with 'role' and 'content'")
        if message.get("role") not in ROLES:
            raise self.error(f"{place} has role {shown(message.get('role'))}; use one of {', '.join(ROLES)}")
        is_call = "tool_calls" in message
        if not isinstance(message.get("content"), str | None if is_call else str):
            remedy = "give a string, or null with tool_calls" if is_call else "give a string"
            raise self.error(f"{place} has content {shown(message.get('content'))}; {remedy}")
        if message["role"] == "user" and not message["content"].strip():
            raise self.error(f"{place} is a user's message without text; give the prompt, or remove the line")
        if message["role"] == "system" and not is_first:
            raise self.error(f"{place} is a system message; only the first message may be one")

    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """Return the tools of a conversation: JSON schemas in OpenAI's form, or none if the field is missing."""
        value = self.value(self.format.tools)
        try:
            return standard_tools(value)
        except ValueError as error:
            raise self.error(
                f"'{self.field(self.format.tools)}' is {shown(value)}: {error}; give a list of tools, each "
                '{"type": "function", "function": {"name": "...", "parameters": {...}}}'
            ) from error

    def _with_standard_calls(self, place: str, message: Any) -> Any:
        """Return a message with its tool calls in the standard form. Raises DataError for calls that cannot be
        read."""
        try:
            return with_standard_calls(message) if isinstance(message, Mapping) else message
        except ValueError as error:
            raise self.error(f"{place} {error}") from error


def read_records(source: str | Path, names: FieldNames | None = None) -> Iterator[Record]:
    """Yield the records of a data source in order. Blank lines are skipped.

    `names` gives the field names. Without it, the format is recognised from the first record. Raises DataError if the
    source is missing or empty, or if a row is not a JSON object.
    """
    format: RecordFormat | None = None
    for path in data_files(source):
        for row in rows_of(path):
            record = make_record(path, row, names, format)
            format = record.format
            yield record
    if format is None:
        raise DataError(f"{source}: the file holds no records; write one JSON object per line")


def make_record(path: Path, row: Row, names: FieldNames | None, format: RecordFormat | None) -> Record:
    """Return the record in a row. Raises DataError for a row that is not a JSON object.

    `format` is the format of the source's first record. None: the row is the first.
    """
    if isinstance(row.value, DataError):
        raise row.value
    if not isinstance(row.value, dict):
        place = f"{path}, {row.unit} {row.number}"
        raise DataError(
            f"{place}: {shown(row.value)} is not a JSON object; each record must be an object with named fields"
        )
    # A field empty in this row may have values in other rows, so the columns count as field names too.
    format = format or (names or _BY_FORMAT).format_of({**dict.fromkeys(row.columns), **row.value})
    return Record(path, row.number, row.value, format, row.unit, names or _BY_FORMAT)


def make_results(
    records: Iterable[Record],
    make: Callable[[int, Record], Made],
    on_long: Callable[[TooLongError], object] | None = None,
) -> Iterator[Made]:
    """Yield the result of `make` for each record and its number, counted from 0.

    `on_long`, if given, is called with the error of each record that is too long. Other errors of `make` are raised.
    """
    for index, record in enumerate(records):
        try:
            made = make(index, record)
        except TooLongError as error:
            if on_long is None:
                raise
            on_long(error)
        else:
            yield made


def _with_standard_names(message: Any) -> Any:
    """Return a message with the keys `role` and `content`, also if it has `from` and `value` (ColossalChat,
    ShareGPT)."""
    if not isinstance(message, Mapping) or "role" in message or "from" not in message:
        return message
    rest = {name: value for name, value in message.items() if name not in ("from", "value")}
    role = message["from"]
    content = {"content": message["value"]} if "value" in message else {}
    return {"role": _ROLES_ELSEWHERE.get(role, role) if isinstance(role, str) else role, **content, **rest}
