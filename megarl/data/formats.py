"""Formats of records: in which fields other programs' data have prompt, answer and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

PROMPTS = ("messages", "prompt", "context", "conversations")
RESPONSES = ("response", "completion")


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """The fields of a record by what they hold, the first counts that a record has; dots reach into objects."""

    name: str
    prompt: tuple[str, ...] = PROMPTS
    """A text, a message, or a list of messages."""
    answer: tuple[str, ...] = ("gt_answer",)
    """The gold answer: text, or another JSON value."""
    response: tuple[str, ...] = RESPONSES
    """The assistant's answer to learn from."""
    chosen: tuple[str, ...] = ("chosen",)
    rejected: tuple[str, ...] = ("rejected",)
    label: tuple[str, ...] = ("label",)
    """Whether a response is good."""
    tools: tuple[str, ...] = ("tools",)
    input: tuple[str, ...] = ()
    """A text that belongs to the prompt's: the user says both, an empty line between."""
    unread: tuple[str, ...] = ()
    """Fields that would change the prompt and are not read: a record that has a value there is refused."""

    def with_fields(self, fields: Mapping[str, str], answer_field: str | None = None) -> RecordFormat:
        """The format with a user's own names of fields."""
        own: dict[str, tuple[str, ...]] = {role: (name,) for role, name in fields.items()}
        if "prompt" in own:
            # What belongs to the format's own prompt is no part of another.
            own = {"input": (), "unread": (), **own}
        return replace(self, **own, **({"answer": (answer_field,)} if answer_field else {}))


FORMATS = {
    format.name: format
    for format in (
        RecordFormat("colossalrl", answer=("gt_answer", "test_cases")),
        RecordFormat("rl2", answer=("answer",)),
        RecordFormat("verl", prompt=("prompt", "messages"), answer=("reward_model.ground_truth",)),
        RecordFormat(
            "trl",
            prompt=("prompt", "messages"),
            answer=("answer", "solution", "ground_truth"),
            response=("completion",),
        ),
        RecordFormat("slime", prompt=("prompt", "messages"), answer=("label",)),
        RecordFormat("openrlhf", prompt=("input", "prompt"), answer=("label", "answer"), response=("output",)),
        RecordFormat(
            "alpaca",
            prompt=("instruction",),
            answer=("gt_answer", "answer", "label", "output"),
            response=("output", "response", "completion"),
            input=("input", "context"),
            unread=("system", "history"),
        ),
    )
}
"""Formats by the program whose they are; colossalrl is megarl's own too."""


@dataclass(frozen=True, slots=True)
class FieldNames:
    """How a recipe names the fields of records: their format, None to recognise it, and names of the user's own."""

    format: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    answer_field: str | None = None

    def of(self, first: Mapping[str, Any]) -> RecordFormat:
        """The format of records whose first is this one."""
        found = FORMATS[self.format] if self.format else recognised(first)
        return found.with_fields(self.fields, self.answer_field)


def recognised(fields: Mapping[str, Any]) -> RecordFormat:
    """The format of a record; one that fits none is taken for megarl's own."""
    # By the names alone: a value may be missing in the first record.
    if "reward_model.ground_truth" in fields or value_at(fields, "reward_model.ground_truth") is not None:
        name = "verl"
    elif "instruction" in fields and not {"messages", "prompt", "conversations"} & fields.keys():
        name = "alpaca"
    elif "gt_answer" in fields:
        name = "colossalrl"
    elif "input" in fields and not {"messages", "prompt", "conversations"} & fields.keys():
        name = "openrlhf"
    elif "messages" in fields and "answer" in fields:
        name = "rl2"
    elif "prompt" in fields and "label" in fields and not _is_judgement(fields):
        name = "slime"
    elif "prompt" in fields and {"completion", "answer", "solution", "ground_truth"} & fields.keys():
        name = "trl"
    else:
        name = "colossalrl"
    return FORMATS[name]


def _is_judgement(fields: Mapping[str, Any]) -> bool:
    """Whether the label of a record says that its response is good, and is no answer; it may be empty."""
    if fields["label"] is None:
        return any(name in fields for name in RESPONSES)
    return isinstance(fields["label"], bool)


def value_at(fields: Mapping[str, Any], name: str) -> Any:
    """The value of a field; of a dotted name, unless the record has it as it is, the value inside. None if absent."""
    if name in fields:
        return fields[name]
    value: Any = fields
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def first_of(fields: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """The first of these names that a record has a value of."""
    return next((name for name in names if value_at(fields, name) is not None), None)
