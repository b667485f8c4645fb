"""Formats of records: in which fields other programs' data have prompt, answer and the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from megarl.files.strict_json import shortened

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


_USUAL_NAMES: dict[str, tuple[str, ...]] = {
    "prompt": ("messages", "prompt", "question", "problem", "query", "instruction", "input", "conversations", "text"),
    "answer": ("gt_answer", "answer", "solution", "ground_truth", "final_answer", "label", "target", "output"),
    "response": ("response", "completion", "output", "answer", "solution"),
    "chosen": ("chosen", "preferred", "accepted", "winner"),
    "rejected": ("rejected", "dispreferred", "loser"),
    "label": ("label", "is_good", "correct"),
}
"""Names that data sets in use have for a role, the most likely first: for a remedy, never for reading."""
_UNKNOWN = "FIELD"
"""Stands in a remedy for a name that cannot be guessed."""


@dataclass(frozen=True, slots=True)
class FieldNames:
    """How a recipe names the fields of records: their format, None to recognise it, and names of the user's own."""

    format: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    """Names of the user's own, by role."""
    answer_field: str | None = None
    remedy: str = "'data.fields={}'"
    """The text by which a person names the fields of these records; `{}` stands for the names by role."""

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


def missing_roles(fields: Mapping[str, Any], format: RecordFormat, roles: Sequence[str]) -> list[str]:
    """The roles that no field of a record has, not even an empty one."""
    return [
        role
        for role in roles
        if not any(name in fields or value_at(fields, name) is not None for name in getattr(format, role))
    ]


def missing_text(record: Mapping[str, Any], format: RecordFormat, names: FieldNames, missing: Sequence[str]) -> str:
    """Why a record cannot be read: all roles without a field, the names that were looked for, the remedy to paste."""
    own = {**names.fields, **({"answer": names.answer_field} if names.answer_field else {})}
    tried = " and ".join(f"{' or '.join(getattr(format, role))} ({role})" for role in missing)
    if all(role in own for role in missing):
        why = "which are the names given"
    elif names.format is not None:
        why = f"the names of the format {format.name}, which is given"
    elif format.name == recognised({}).name and "gt_answer" not in record:
        why = f"the names of {format.name}, since the record fits none of {', '.join(FORMATS)}"
    else:
        why = f"the names of {format.name}, which the first record's fields fit"
    named = {role: name for role, name in own.items() if role not in missing}
    named |= _guessed({name: value for name, value in record.items() if name not in named.values()}, missing)
    remedy = names.remedy.replace("{}", "{" + ", ".join(f"{role}: {name}" for role, name in named.items()) + "}")
    return (
        f"no field for {' and '.join(missing)}; the record has {_listed(record)}. Looked for {tried}, {why}. "
        f"Add what is missing, or name yours: {remedy}"
    )


def _guessed(record: Mapping[str, Any], roles: Sequence[str]) -> dict[str, str]:
    """A field for each role: by its usual names, or the texts that are left, in order, where there are as many."""
    found: dict[str, str] = {}
    for role in roles:
        free = [name for name in _USUAL_NAMES.get(role, ()) if name in record and name not in found.values()]
        if free:
            found[role] = free[0]
    open_roles = [role for role in roles if role not in found]
    texts = [name for name, value in record.items() if isinstance(value, str) and name not in found.values()]
    names = texts if len(texts) == len(open_roles) else [_UNKNOWN] * len(open_roles)
    found |= zip(open_roles, names, strict=True)
    return {role: found[role] for role in roles}


def _listed(fields: Mapping[str, Any]) -> str:
    """The first few of a record's fields."""
    first = [repr(shortened(name)) for name in islice(fields, 20)]
    return ", ".join([*first, f"{len(fields) - 20} more"] if len(fields) > 20 else first) or "none at all"


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
