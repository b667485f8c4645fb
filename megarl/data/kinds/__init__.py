"""The kinds of training examples, by their names in `KINDS`.

A kind has four functions of a record. `make` returns the example. `parts` returns everything that is trained on, and
raises the errors needing no tokenizer. `prompt` returns the messages before the answer. `sequences` returns an
example's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from megarl.data.formats import RecordFormat, first_name_with_value, value_at
from megarl.data.kinds.conversations import Conversations
from megarl.data.kinds.preferences import Judged, Pairs
from megarl.data.kinds.problems import Problems

KindName = Literal["problems", "conversations", "pairs", "judged"]
"""Kind of training examples. problems: loop rl. conversations: sft. pairs: preference and reward_model. judged:
preference with the loss kto."""
AnyKind = Problems | Conversations | Pairs | Judged
KINDS: dict[KindName, type[AnyKind]] = {
    "problems": Problems,
    "conversations": Conversations,
    "pairs": Pairs,
    "judged": Judged,
}


def kind_of(fields: Mapping[str, Any], format: RecordFormat) -> KindName:
    """Return the kind of training examples that fits a record's fields."""
    if first_name_with_value(fields, format.chosen) and first_name_with_value(fields, format.rejected):
        return "pairs"
    label = first_name_with_value(fields, format.label)
    if label is not None and isinstance(value_at(fields, label), bool):
        return "judged"
    answer = first_name_with_value(fields, format.answer)
    # A field with both roles (`output` of alpaca) is a response: the record is a conversation.
    if answer and answer not in format.response:
        return "problems"
    return "conversations"
