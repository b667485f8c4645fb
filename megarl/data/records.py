"""A record of a data source (line or row), with access to its fields. Every error names the file and the line."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from megarl.data.chat_text import chat_in_text
from megarl.data.formats import (
    FORMATS,
    GOLD_ANSWERS,
    RESPONSES,
    FieldNames,
    RecordFormat,
    first_name_with_value,
    missing_fields_message,
    missing_roles,
    value_at,
)
from megarl.data.messages import (
    REASONING,
    REASONING_KEYS,
    WEIGHT,
    have_same_texts,
    history_messages,
    is_blank,
    standard_messages,
)
from megarl.data.sources.rows import EncodedBytes
from megarl.data.tools.records import standard_tools
from megarl.data.tools.schemas import ToolSchema
from megarl.files.strict_json import RoundedNumber, shown
from megarl.types import DataError

BY_FORMAT = FieldNames()
"""Field names of a recipe without any: the first record shows the format."""
_LABEL = re.compile(r"[\w.-]{0,20}", re.ASCII)
"""Matches a text that stands where reasoning would, but is none: empty, or one short word such as off.

Only ASCII, because some scripts write whole sentences without spaces.
"""


_LABEL_FIELD = "label"
"""Field with the gold answer in slime and OpenRLHF. In other data it is a class or a verdict."""
_QUESTIONS = ("question", "query", "problem", "instruction")
"""Fields with a question in records that have its passage in `context`."""
_OPTIONS = ("options", "choices")
"""Fields with the options of a multiple-choice question."""
_OPTION_LABEL = re.compile(r"[A-Za-z]|\d+")
_LABEL_IN_OPTION = re.compile(r"^\(?[A-Za-z]\s*[).:]")
"""Label before an option's text, as in `A)3` of AQuA."""
_UNWRITTEN_OPTIONS = {"yes", "no", "maybe", "true", "false"}
"""Options that a question need not write: it asks for them."""


class TooLongError(DataError):
    """A record has more tokens than the recipe allows."""


@dataclass(frozen=True, slots=True)
class Record:
    """One line or row of a data file."""

    path: Path
    line: int
    fields: Mapping[str, Any]
    format: RecordFormat = FORMATS["colossalrl"]
    unit: str = "line"
    """Unit of `line`: lines of a text file, rows of a table, or records of a JSON list."""
    names: FieldNames = BY_FORMAT
    """The recipe's field names. Errors suggest how to change them."""

    def error(self, problem: str, kind: type[DataError] = DataError) -> DataError:
        """Return a DataError whose message begins with the file and the line."""
        return kind(f"{self.path}, {self.unit} {self.line}: {problem}")

    def value(self, names: tuple[str, ...]) -> Any:
        return next((value for name in names if (value := value_at(self.fields, name)) is not None), None)

    def at(self, name: str) -> Any:
        """Return the value of a field, or None. A dot in the name selects a field of an inner object."""
        return value_at(self.fields, name)

    def field(self, names: tuple[str, ...]) -> str:
        """Return the first of these fields in the record, else the first name. Empty: no names."""
        return first_name_with_value(self.fields, names) or next(iter(names), "")

    def require(self, *roles: str, optional_roles: Sequence[str] = ()) -> None:
        """Raise a DataError that lists the roles without a field in the record.

        If a role is missing, the error also lists missing optional roles `optional_roles`.
        """
        if missing_roles(self.fields, self.format, roles):
            missing = missing_roles(self.fields, self.format, (*optional_roles, *roles))
            raise self.error(missing_fields_message(self.fields, self.format, self.names, missing))

    def answer(self) -> Any:
        """Return the record's gold answer: text (also for a number), or a JSON object or list.

        Raises DataError for null, true, false, and empty values.
        """
        self.require("answer")
        field = self.field(self.format.answer)
        value = self.at(field)
        self._refuse_other_answers(field, value)
        # Refuse true and false: str() would turn them into the answers "True" and "False".
        if value is None or isinstance(value, bool):
            raise self.error(f"'{field}' is {shown(value)}; give the answer as a string")
        if any(isinstance(item, RoundedNumber) for item in (value if isinstance(value, list) else [value])):
            raise self.error(f"'{field}' has a number with more digits than a float keeps; give the answer as a string")
        if isinstance(value, dict | list):
            if not value:
                raise self.error(f"'{field}' is {shown(value)}; give the answer, or remove the line")
            return value
        if not (text := str(value)).strip():
            raise self.error(f"'{field}' is empty; give the answer, or remove the line")
        return text

    def _refuse_other_answers(self, field: str, value: Any) -> None:
        """Raise DataError if another usual field has another gold answer. The recipe may name the right one."""
        is_named = self.names.answer_field or self.names.format or "answer" in self.names.fields
        if is_named or field not in (*GOLD_ANSWERS, _LABEL_FIELD):
            return
        for name in GOLD_ANSWERS:
            other_answer = self.at(name)
            if name == field or is_blank(other_answer) or _is_same_answer(other_answer, value):
                continue
            # `answer` is often a worked solution that ends with the final answer.
            is_solution = name == "answer" and isinstance(other_answer, str)
            if is_solution and _ends_with_answer(other_answer, str(value).strip()):
                continue
            raise self.error(
                f"'{name}' is {shown(other_answer)}, but the gold answer is read from '{field}', {shown(value)}; "
                "remove one of the two fields, or name the answer's: "
                f"{self.names.remedy.replace('{}', '{answer: ' + field + '}')}"
            )

    def prompt(self, system_prompt: str | None = None) -> tuple[Mapping[str, Any], ...]:
        """Return the conversation before the answer, from a text, one message, or a list of messages.

        The record's system message and earlier turns come first. `system_prompt` replaces a missing system message.
        """
        self.require("prompt")
        field = self.field(self.format.prompt)
        # A field named `messages` never holds a plain text; all other fields may.
        messages = self.messages(field, role=None if field == "messages" else "user")
        return self.with_opening(messages, system_prompt)

    def messages(self, field: str = "messages", *, role: str | None = None) -> tuple[Mapping[str, Any], ...]:
        """Return the messages in a field: one message or a list of them, as objects or as JSON text.

        With `role`, any other text becomes a message of this role. A format's `input` field is appended to the prompt.
        Raises DataError for invalid messages, and for unknown keys.
        """
        value = self.at(field)
        if isinstance(value, EncodedBytes):
            raise self.error(f"'{field}' has bytes that are not UTF-8 text; save the column as text")
        value = self._parse_saved_chat(field, value, is_answer=role == "assistant")
        if field in self.format.prompt:
            value = self._append_input(field, value)
        if role and isinstance(value, str) and value.strip():
            value = {"role": role, "content": value}
        if isinstance(value, Mapping):
            value = [value]
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            raise self.error(
                f"'{field}' is {'missing' if value is None else shown(value)}; give "
                f'{"a text, " if role else ""}one message {{"role": "user", "content": "..."}} or a list of them'
            )
        try:
            return tuple(standard_messages(value, field))
        except ValueError as error:
            raise self.error(str(error)) from error

    def with_opening(
        self, messages: Sequence[Mapping[str, Any]], system_prompt: str | None
    ) -> tuple[Mapping[str, Any], ...]:
        """Return the record's system message and earlier turns, followed by the messages.

        `system_prompt` replaces a missing system message. Raises DataError for two different system messages.
        """
        history = self._read_history()
        system_messages = [turn for turn in (*self._read_system(), *history, *messages) if turn["role"] == "system"]
        # A blank system message does not contradict a filled one.
        system_messages = [
            system_message for system_message in system_messages if system_message["content"].strip()
        ] or system_messages
        for system_message in system_messages:
            if system_message["content"].strip() != system_messages[0]["content"].strip():
                raise self.error(
                    f"the system messages {shown(system_messages[0]['content'])} and "
                    f"{shown(system_message['content'])} differ; give one, in the conversation or in "
                    f"'{self.field(self.format.system)}'"
                )
        if not system_messages and system_prompt is not None:
            system_messages = [{"role": "system", "content": system_prompt}]
        return (*system_messages[:1], *(turn for turn in (*history, *messages) if turn["role"] != "system"))

    def _read_system(self) -> tuple[Mapping[str, Any], ...]:
        """Return the record's system message, or nothing. Raises DataError for two different ones."""
        names = self.format.system
        # Most records have none of the fields.
        if not any(name in self.fields or "." in name for name in names):
            return ()
        messages_by_field = [self.messages(name, role="system") for name in names if not is_blank(self.at(name))]
        for messages in messages_by_field:
            if (
                len(messages) != 1
                or messages[0]["role"] != "system"
                or not have_same_texts(messages, messages_by_field[0])
            ):
                raise self.error(
                    f"'{self.field(self.format.system)}' is {shown(self.value(self.format.system))}; give the text of "
                    "one system message, in one field"
                )
        return messages_by_field[0] if messages_by_field else ()

    def _read_history(self) -> tuple[Mapping[str, Any], ...]:
        if is_blank(turns := self.value(self.format.history)):
            return ()
        try:
            return tuple(history_messages(turns, self.field(self.format.history)))
        except ValueError as error:
            raise self.error(str(error)) from error

    def _parse_saved_chat(self, field: str, value: Any, *, is_answer: bool) -> Any:
        """Return a field's value, or the messages of a chat saved in it as JSON."""
        if not isinstance(value, str):
            return value
        try:
            return chat_in_text(value, is_answer=is_answer) or value
        except ValueError as error:
            raise self.error(f"'{field}' {error}") from error

    def refuse_other_prompts(self, messages: Sequence[Mapping[str, Any]], *, with_answers: bool) -> None:
        """Raise DataError if another prompt field has texts that `messages` lack.

        `with_answers`: texts of the assistant's messages in that field count too.
        """
        self._refuse_unwritten_options(messages)
        field = self.field(self.format.prompt)
        # Next to a question, `context` is only the passage that it is about.
        questions = _QUESTIONS if field == "context" and "prompt" not in self.names.fields else ()
        for name in (*self.format.other_prompts, *questions):
            if name == field or is_blank(self.fields.get(name)):
                continue
            is_input = name in self.format.input and name == self.field(self.format.input)
            if is_input or self._has_only_texts_of(messages, name, with_answers=with_answers):
                continue
            raise self.error(
                f"'{name}' is {shown(self.fields[name])}, but the prompt is read from '{field}'; remove one of the two "
                f"fields, or name the prompt's: {self.names.remedy.replace('{}', '{prompt: ' + field + '}')}"
            )

    def _refuse_unwritten_options(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise DataError if the record has the options of a multiple-choice question, and `messages` lack one."""
        options = {name: _read_options(self.fields.get(name)) for name in _OPTIONS if name not in self.format.names}
        if not any(options.values()):
            return
        written_text = _without_space("\n".join(message.get("content") or "" for message in messages))
        for name, texts in options.items():
            if all(text.strip().casefold() in _UNWRITTEN_OPTIONS for text in texts):
                continue
            if missing_option := next((text for text in texts if _strip_option(text) not in written_text), None):
                raise self.error(
                    f"'{name}' has the option {shown(missing_option)}, but the prompt does not write it; write the "
                    "options into the prompt, or rename the field if they are not part of the question"
                )

    def refuse_other_responses(self, field: str) -> None:
        """Raise DataError if another usual response field has another answer than `field`, the field that is read.

        Nothing is checked if the recipe names the response field.
        """
        if "response" in self.names.fields:
            return
        for name in RESPONSES:
            if name == field or is_blank(self.fields.get(name)) or self.fields[name] == self.at(field):
                continue
            raise self.error(
                f"'{name}' is {shown(self.fields[name])}, but the answer is read from '{field}'; remove one of the two"
            )

    def _has_only_texts_of(self, messages: Sequence[Mapping[str, Any]], name: str, *, with_answers: bool) -> bool:
        """Return whether `messages` have all texts of field `name`, except answers if not `with_answers`."""
        try:
            turns = self.messages(name, role="user")
        except DataError:
            return False
        texts = "\n".join(message.get("content") or "" for message in messages)
        compared_turns = [turn for turn in turns if with_answers or turn["role"] != "assistant"]
        return all((turn.get("content") or "").strip() in texts for turn in compared_turns)

    def refuse_reasoning_field(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise DataError if a field has reasoning that `messages` lack.

        Reasoning of an answer is in `reasoning_content`, or begins its text. One short word is a label, like off.
        """
        for name in REASONING_KEYS:
            reasoning = self.fields.get(name)
            if not isinstance(reasoning, str) or _LABEL.fullmatch(reasoning.strip()) or name in self.format.names:
                continue
            texts = (message.get(key) or "" for message in messages for key in (REASONING, "content"))
            if not any(reasoning.strip() in text for text in texts):
                raise self.error(
                    f"'{name}' is {shown(reasoning)}, which is not read; give the answer as a message "
                    f'{{"role": "assistant", "{REASONING}": "...", "content": "..."}}, or remove the field'
                )

    def refuse_unlisted_calls(
        self, messages: Sequence[Mapping[str, Any]], environment_tools: Callable[[], Sequence[ToolSchema]] = tuple
    ) -> None:
        """Raise DataError for a call to a tool that the record does not list. Messages with weight 0 may have one.

        Without tools in the record, the calls must be to the environment's tools. Without any tools, nothing is
        checked: they may be described in a text (`find_undescribed_tool`).
        """
        calls = [call for message in messages if WEIGHT not in message for call in message.get("tool_calls", ())]
        # Most records have no calls. Tools are read only for the others, because checking their schemas takes time.
        if not calls or not (tools := self.tools() or environment_tools()):
            return
        names = {tool["function"]["name"] for tool in tools}
        for call in calls:
            if (name := call["function"]["name"]) not in names:
                raise self.error(
                    f"a message calls the tool {shown(name)}, but the conversation's tools are only "
                    f"{', '.join(sorted(names))}; add the tool to '{self.field(self.format.tools)}', or give "
                    '"weight": 0 at the message'
                )

    def _append_input(self, field: str, prompt: Any) -> Any:
        input_text = self.value(self.format.input)
        if input_text is None or (isinstance(input_text, str) and not input_text.strip()):
            return prompt
        if not isinstance(prompt, str) or not isinstance(input_text, str):
            raise self.error(
                f"'{field}' is {shown(prompt)} and '{self.field(self.format.input)}' is {shown(input_text)}; give "
                "texts, or the conversation in 'messages'"
            )
        return f"{prompt}\n\n{input_text}" if prompt.strip() else prompt

    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """Return the conversation's tools: JSON schemas in OpenAI's form. Empty: the field is missing."""
        value = self.value(self.format.tools)
        try:
            return standard_tools(value)
        except ValueError as error:
            raise self.error(
                f"'{self.field(self.format.tools)}' is {shown(value)}: {error}; give a list of tools, each "
                '{"type": "function", "function": {"name": "...", "parameters": {...}}}'
            ) from error


def find_undescribed_tool(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the first tool that a message calls, and that no earlier message names, or None.

    For records without tools: the model would learn to call a tool that it was not shown.
    """
    earlier_texts = ""
    for message in messages:
        for call in message.get("tool_calls", ()) if WEIGHT not in message else ():
            if (name := call["function"]["name"]) not in earlier_texts:
                return name
        if message["role"] != "assistant":
            earlier_texts += "\n" + (message.get("content") or "")
    return None


def _read_options(value: Any) -> list[str]:
    """Return the options of a multiple-choice question, or nothing for other values.

    Three forms: a list of texts, texts by label (A or 1), or texts with labels (ARC).
    """
    if isinstance(value, Mapping) and isinstance(value.get("text"), list):
        value = value["text"]
    if isinstance(value, Mapping):
        value = list(value.values()) if all(map(_OPTION_LABEL.fullmatch, value)) else ()
    is_list = isinstance(value, list) and len(value) > 1 and all(isinstance(text, str) for text in value)
    return [text for text in value if text.strip()] if is_list else []


def _strip_option(text: str) -> str:
    """Return an option without its label, spaces and closing punctuation. In the prompt these may differ."""
    return _without_space(_LABEL_IN_OPTION.sub("", text.strip())).rstrip(".;,") or _without_space(text)


def _without_space(text: str) -> str:
    return "".join(text.split()).casefold()


def _ends_with_answer(solution: str, answer: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(answer)}(?!\w|[.,]\d)", solution) is not None


def _is_same_answer(first: Any, second: Any) -> bool:
    """Return whether two gold answers are equal as texts, as numbers, or as a list's only item."""
    answers = [value[0] if isinstance(value, list) and len(value) == 1 else value for value in (first, second)]
    texts = [str(value).strip() for value in answers]
    try:
        return texts[0] == texts[1] or Decimal(texts[0]) == Decimal(texts[1])
    except InvalidOperation:
        return False
