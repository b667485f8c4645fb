"""Formats of records: other programs' field names for prompt, answer and so on."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from functools import cache, lru_cache
from itertools import islice
from typing import Any

from megarl.files.strict_json import MEDIUM, parse, shortened

PROMPTS = ("messages", "prompt", "context", "conversations")
RESPONSES = ("response", "completion")
GOLD_ANSWERS = (
    "answer", "ground_truth", "gt_answer", "final_answer", "expected_answer", "reference_answer",
    "reward_model.ground_truth",
)  # fmt: skip
"""Fields of which any may hold the final answer. Different values in two of them are an error."""
_PROMPT_ROLES = ("prompt", "input", "system", "history", "tools", "other_prompts")
"""Roles whose fields together make a prompt. A field with two of these roles would be read twice."""


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """Names of a record's fields by role (prompt, answer, ...). The first name in the record counts.

    A dot in a name selects a field of an inner object.
    """

    name: str
    prompt: tuple[str, ...] = PROMPTS
    """Fields with the prompt: a text, a message, or a list of messages."""
    answer: tuple[str, ...] = ("gt_answer",)
    """Fields with the gold answer: text, or another JSON value."""
    response: tuple[str, ...] = RESPONSES
    """Fields with the assistant's answer to imitate (sft) or to judge (kto)."""
    chosen: tuple[str, ...] = ("chosen",)
    rejected: tuple[str, ...] = ("rejected",)
    label: tuple[str, ...] = ("label",)
    """Fields saying whether a response is good (kto)."""
    tools: tuple[str, ...] = ("tools",)
    input: tuple[str, ...] = ()
    """Fields with a text appended to the prompt after an empty line, in the user's message."""
    system: tuple[str, ...] = ("system", "system_prompt", "system_message")
    """Fields with the system message of the record."""
    history: tuple[str, ...] = ("history",)
    """Fields with earlier turns, as messages or as pairs of a question and an answer. They come before the prompt."""
    other_prompts: tuple[str, ...] = PROMPTS
    """Fields that usually hold a prompt. If the format reads another field, a text in one of them is an error."""

    @property
    def names(self) -> frozenset[str]:
        return _all_field_names(self)

    def with_fields(self, fields: Mapping[str, str], answer_field: str | None = None) -> RecordFormat:
        """Return a copy with a user's field names. A field that the user named loses its usual role."""
        user_names: dict[str, tuple[str, ...]] = {role: (name,) for role, name in fields.items()}
        if "prompt" in user_names:
            # The user's prompt field replaces the format's, and so its `input`. Other prompts are left out on purpose.
            user_names = {"input": (), "other_prompts": (), **user_names}
        if answer_field:
            user_names["answer"] = (answer_field,)
        return replace(self, **self._select_usual_fields(user_names), **user_names)

    def _select_usual_fields(self, user_names: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        """Return the usual fields of each role that the user did not name, without fields that the user named."""
        named_fields = {name for names in user_names.values() for name in names}
        # Outside the prompt, a field may have two roles: `output` of alpaca is the answer of one training and the
        # response of another.
        named_in_prompt = {name for role, names in user_names.items() if role in _PROMPT_ROLES for name in names}
        usual_fields: dict[str, tuple[str, ...]] = {}
        roles = [role_field.name for role_field in dataclass_fields(self) if role_field.name != "name"]
        for role in roles:
            if role in user_names:
                continue
            excluded_names = named_fields if role in _PROMPT_ROLES else named_in_prompt
            usual_fields[role] = tuple(name for name in getattr(self, role) if name not in excluded_names)
        return usual_fields


@cache
def _all_field_names(format: RecordFormat) -> frozenset[str]:
    roles = (getattr(format, field.name) for field in dataclass_fields(format) if field.name != "other_prompts")
    return frozenset(name for names in roles if isinstance(names, tuple) for name in names)


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
        ),
    )
}
"""Formats by the program that writes them. `colossalrl` is megarl's own format too."""


_USUAL_NAMES: dict[str, tuple[str, ...]] = {
    "prompt": ("messages", "prompt", "question", "problem", "query", "instruction", "input", "conversations", "text"),
    "answer": (
        "gt_answer", "answer", "solution", "ground_truth", "final_answer", "expected_answer", "label", "target",
        "output", "reward_spec.ground_truth",
    ),
    "response": ("response", "completion", "output", "answer", "solution"),
    "chosen": ("chosen", "preferred", "accepted", "winner"),
    "rejected": ("rejected", "dispreferred", "loser", "rejected_response"),
    "label": ("label", "kto_tag", "is_good", "correct"),
}  # fmt: skip
"""Field names of public data sets by role, the most frequent first. Errors suggest these names."""
_PLAIN_NAME = re.compile(r"(?!(?:null|true|false|yes|no|on|off|[yn])$)[^\W\d][\w.-]*(?: [\w.-]+)*", re.IGNORECASE)
_UNKNOWN = "FIELD"
"""Placeholder in an error for a field name that cannot be guessed."""


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Field names in a recipe. `format` None: the first record shows the format."""

    format: str | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    """The user's field names, keyed by role."""
    answer_field: str | None = None
    """The user's name for the field with the gold answer. None: the format's name."""
    remedy: str = "'data.fields={}'"
    """Override that errors suggest; `{}` stands for the field names by role."""

    def format_of(self, first_record: Mapping[str, Any]) -> RecordFormat:
        """Return the format of the source with this first record."""
        base = FORMATS[self.format] if self.format else recognise_format(first_record)
        return base.with_fields(self.fields, self.answer_field)


def recognise_format(fields: Mapping[str, Any]) -> RecordFormat:
    """Return the format with the field names of a record. If none matches, return megarl's own."""
    # Use the names alone: a value may be empty in the first record. The order matters: specific names come before
    # names shared by several formats.
    if _has_field(fields, "reward_model.ground_truth"):
        name = "verl"
    elif "instruction" in fields and not {"messages", "prompt", "conversations"} & fields.keys():
        name = "alpaca"
    elif "gt_answer" in fields:
        name = "colossalrl"
    elif "input" in fields and not {"messages", "prompt", "conversations"} & fields.keys():
        name = "openrlhf"
    elif "messages" in fields and "answer" in fields:
        name = "rl2"
    # TRL's records for kto have these fields too, with a boolean label.
    elif "prompt" in fields and "label" in fields and not _is_judgement(fields):
        name = "slime"
    elif "prompt" in fields and {"completion", "answer", "solution", "ground_truth"} & fields.keys():
        name = "trl"
    else:
        name = "colossalrl"
    return FORMATS[name]


def missing_roles(fields: Mapping[str, Any], format: RecordFormat, roles: Sequence[str]) -> list[str]:
    """Return the roles without a field in the record. Empty fields count as present."""
    return [role for role in roles if not any(_has_field(fields, name) for name in getattr(format, role))]


def _has_field(fields: Mapping[str, Any], name: str) -> bool:
    return name in fields or value_at(fields, name) is not None


def missing_fields_message(
    record: Mapping[str, Any], format: RecordFormat, names: FieldNames, missing: Sequence[str]
) -> str:
    """Return why a record cannot be read: the missing roles, the names searched, and an override to paste."""
    user_names = {**names.fields, **({"answer": names.answer_field} if names.answer_field else {})}
    searched_names = " and ".join(
        f"{' or '.join(getattr(format, role)) or 'no other field'} ({role})" for role in missing
    )
    # Say where the searched names come from.
    if all(role in user_names for role in missing):
        origin_of_names = "the names given in the recipe"
    elif names.format is not None:
        origin_of_names = f"the names of the format {format.name}, given in the recipe"
    elif format.name == recognise_format({}).name and "gt_answer" not in record:
        origin_of_names = f"the names of {format.name}, since the record fits none of {', '.join(FORMATS)}"
    else:
        origin_of_names = f"the names of {format.name}, recognised from the first record's fields"
    fields_by_role = {role: name for role, name in user_names.items() if role not in missing}
    read_names = set(fields_by_role.values()) | (set() if "prompt" in missing else set(format.prompt))
    fields_by_role |= _guess_fields({name: value for name, value in record.items() if name not in read_names}, missing)
    remedy = names.remedy.replace(
        "{}", "{" + ", ".join(f"{role}: {_quote_for_yaml(name)}" for role, name in fields_by_role.items()) + "}"
    )
    return (
        f"no field for {' and '.join(missing)}; the record has {_list_first_names(record)}. Looked for "
        f"{searched_names}, {origin_of_names}. Add what is missing, or name yours: {remedy}"
    )


def _guess_fields(record: Mapping[str, Any], roles: Sequence[str]) -> dict[str, str]:
    """Return a field by role, by its usual name. If as many texts as roles remain, assign them in order."""
    guesses: dict[str, str] = {}
    for role in roles:
        unassigned_names = [
            name for name in _USUAL_NAMES.get(role, ()) if name not in guesses.values() and _has_field(record, name)
        ]
        if unassigned_names:
            guesses[role] = unassigned_names[0]
    open_roles = [role for role in roles if role not in guesses]
    text_names = [name for name, value in record.items() if isinstance(value, str) and name not in guesses.values()]
    # With another number of texts any choice would be arbitrary, so the remedy shows placeholders.
    names = text_names if len(text_names) == len(open_roles) else [_UNKNOWN] * len(open_roles)
    guesses |= zip(open_roles, names, strict=True)
    return {role: guesses[role] for role in roles}


def _quote_for_yaml(name: str) -> str:
    """Return a field's name for a mapping in YAML: in quotes if YAML would read another text, as for ` answer`."""
    return name if _PLAIN_NAME.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def _list_first_names(fields: Mapping[str, Any]) -> str:
    # 20 names show what the record is. Some tables have hundreds of columns.
    names = [repr(shortened(name)) for name in islice(fields, 20)]
    return ", ".join([*names, f"{len(fields) - 20} more"] if len(fields) > 20 else names) or "none at all"


def _is_judgement(fields: Mapping[str, Any]) -> bool:
    """Return whether `label` is a verdict on a response (kto), not a gold answer. It may be null."""
    if fields["label"] is None:
        return any(name in fields for name in RESPONSES)
    return isinstance(fields["label"], bool)


def value_at(fields: Mapping[str, Any], name: str) -> Any:
    """Return the value of a record's field, or None.

    A dot in the name selects a field of an inner object, or of an object in JSON text. A key equal to the whole name
    comes first.
    """
    if name in fields:
        return fields[name]
    if "." not in name:
        return None
    value: Any = fields
    for part in name.split("."):
        value = _parse_object(value) if isinstance(value, str) else value
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


# A text may be a megabyte, and a dozen fields are looked up in it.
@lru_cache(maxsize=8)
def _parse_object(text: str) -> Any:
    """Return the object in a JSON text: table programs save objects as text."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        return parse(text.encode(), MEDIUM)
    except ValueError:
        return None


def first_name_with_value(fields: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if value_at(fields, name) is not None), None)
