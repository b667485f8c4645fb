"""JSONL records, each fault named by file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from megarl.data.tool_calls import check_tools
from megarl.files.strict_json import parse, shortened
from megarl.types import DataError

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a data file: where it stands, and what it says."""

    path: Path
    line: int
    fields: Mapping[str, Any]

    def error(self, problem: str) -> DataError:
        """A DataError that names this line."""
        return DataError(f"{self.path}, line {self.line}: {problem}")

    def text(self, field: str) -> str:
        """A field that must be there and hold text; a number counts as its text."""
        if field not in self.fields:
            raise self.error(
                f"the record has no field '{field}', only {_names(self.fields)}; "
                f"add it, or name the field that holds the answer in data.answer_field"
            )
        value = self.fields[field]
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self.error(f"'{field}' is {shown(value)}; give the answer as a string")
        if not (text := str(value)).strip():
            raise self.error(f"'{field}' is empty; give the answer, or remove the line")
        return text

    def messages(
        self, system_prompt: str | None = None, *, field: str | None = None, role: str | None = None
    ) -> tuple[Mapping[str, Any], ...]:
        """The conversation of a field, `messages` unless named, from one message or a list of them.

        With `role` a text stands for its message. `system_prompt` goes first unless one is there.
        """
        field = field or "messages"
        value = self.fields.get(field)
        if role and isinstance(value, str) and value.strip():
            value = {"role": role, "content": value}
        if isinstance(value, Mapping):
            value = [value]
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            raise self.error(
                f"'{field}' is {'missing' if value is None else shown(value)}; give "
                f'{"a text, " if role else ""}one message {{"role": "user", "content": "..."}} or a list of them'
            )
        for place, message in enumerate(value):
            self._check_message(f"{field}[{place}]", message, is_first=place == 0)
        if system_prompt is not None and value[0]["role"] != "system":
            value = [{"role": "system", "content": system_prompt}, *value]
        return tuple(value)

    def _check_message(self, place: str, message: Any, *, is_first: bool) -> None:
        if not isinstance(message, Mapping):
            raise self.error(f"{place} is {shown(message)}; give an object with 'role' and 'content'")
        if message.get("role") not in ROLES:
            raise self.error(f"{place} has role {shown(message.get('role'))}; use one of {', '.join(ROLES)}")
        if message["role"] == "assistant" and "tool_calls" in message:
            self._check_calls(place, message)
        elif not isinstance(message.get("content"), str):
            raise self.error(f"{place} has content {shown(message.get('content'))}; give a string")
        if message["role"] == "user" and not message["content"].strip():
            raise self.error(f"{place} is a user's message without text; give the prompt, or remove the line")
        if message["role"] == "system" and not is_first:
            raise self.error(f"{place} is a system message; only the first message may be one")

    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """The tools of a conversation, its field `tools`: JSON schemas in OpenAI's form; none if it is missing."""
        value = self.fields.get("tools") or ()
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self.error(f"'tools' is {shown(value)}; give a list of JSON schemas")
        try:
            check_tools(value)
        except ValueError as error:
            raise self.error(str(error)) from error
        return tuple(value)

    def _check_calls(self, place: str, message: Mapping[str, Any]) -> None:
        if not isinstance(message.get("content"), str | None):
            raise self.error(
                f"{place} has content {shown(message['content'])}; give a string, or null beside tool_calls"
            )
        calls = message["tool_calls"]
        functions = (
            [call.get("function") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
        )
        if not functions or not all(
            isinstance(function, Mapping) and isinstance(function.get("name"), str) for function in functions
        ):
            raise self.error(
                f"{place} has tool_calls {shown(calls)}; give a list of "
                '{"function": {"name": "...", "arguments": {...}}}'
            )


def read_records(path: str | Path) -> Iterator[Record]:
    """The records of a JSONL file in order; blank lines are skipped.

    Raises DataError where the file is missing, holds no record, or a line is not a JSON object (`strict_json.parse`).
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file; check the path in data.train or data.validation")
    empty = True
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            empty = False
            try:
                fields = parse(raw)
            except ValueError as error:
                raise DataError(f"{path}, line {line}: not JSON ({error}); each line must be one JSON object") from None
            if not isinstance(fields, dict):
                raise DataError(f"{path}, line {line}: {shown(fields)} is not a JSON object with fields")
            yield Record(path, line, fields)
    if empty:
        raise DataError(f"{path}: holds no record; write one JSON object per line")


def shown(value: Any) -> str:
    """A value as an error message quotes it: as JSON, cut to a few words."""
    return shortened(json.dumps(value, ensure_ascii=False, default=repr))


def _names(fields: Mapping[str, Any]) -> str:
    """The first few of a record's fields."""
    first = [repr(shortened(name)) for name in islice(fields, 20)]
    return ", ".join([*first, f"{len(fields) - 20} more"] if len(fields) > 20 else first) or "none at all"
