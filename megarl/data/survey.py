"""Survey of a data source before training: errors, lengths, duplicates, overlap with other sources."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from megarl.data.conversations import conversation_messages, make_conversation, refuse_untrained
from megarl.data.formats import FieldNames, RecordFormat, first_name_with_value, value_at
from megarl.data.preferences import EQUAL_LABELS, judged_conversation, make_judged, make_pair, pair_conversations
from megarl.data.problems import make_problem, problem_parts
from megarl.data.records import Record, TooLongError, make_record
from megarl.data.rows import data_files, rows_of
from megarl.types import DataError, TrainingSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

Kind = Literal["problems", "conversations", "pairs", "judged"]
"""Kind of training examples. problems: loop rl. conversations: sft. pairs: preference and reward_model. judged:
preference with the loss kto."""
MAX_TOKENS = 1 << 17
"""Most tokens of a record that a survey measures if no recipe limits them. Encoding megabytes takes minutes."""
MAX_LISTED_FAULTS = 20
"""Maximum number of different errors, of duplicates, and of overlaps listed. All are counted."""
MAX_LISTED_PLACES = 5
"""Maximum number of further records listed for an error. The first record is listed in any case."""


@dataclass(slots=True)
class Fault:
    """An error with the same message in one or more records."""

    problem: str
    place: str
    """First record with the error: `train.jsonl, line 7`. Empty for an error of a whole file."""
    further: list[str] = field(default_factory=list)
    """Places of the next records with the same error, at most `MAX_LISTED_PLACES`, for example `line 8`."""
    count: int = 1

    def __str__(self) -> str:
        text = f"{self.place}: {self.problem}" if self.place else self.problem
        if not self.further:
            return text
        more = ", ..." if self.count - 1 > len(self.further) else ""
        return f"{text} (and {self.count - 1} more: {', '.join(self.further)}{more})"


@dataclass(slots=True)
class Survey:
    """Results of the survey of one data source."""

    source: str
    kind: Kind
    format: RecordFormat | None = None
    num_records: int = 0
    """Number of records without an error."""
    num_long: int = 0
    """Number of records left out as too long (data.overlong: drop)."""
    num_faults: int = 0
    faults: list[Fault] = field(default_factory=list)
    """The first different errors, at most `MAX_LISTED_FAULTS`, each with the records having it."""
    num_different_faults: int = 0
    lengths: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Lengths in tokens of each prompt, conversation or pair (both answers together). Without a tokenizer: in
    characters."""
    num_duplicates: int = 0
    duplicates: list[str] = field(default_factory=list)
    """Records equal to an earlier one in everything used for training: `line 7 (as line 3)`."""
    num_overlaps: dict[str, int] = field(default_factory=dict)
    """Number of records whose prompt is also in another source, keyed by that source."""
    overlaps: list[str] = field(default_factory=list)
    first: list[tuple[str, bool]] = field(default_factory=list)
    """Text of the first record, as pieces (text, whether its tokens are trained)."""

    @property
    def is_sound(self) -> bool:
        """Return whether a run could train on the source: no errors."""
        return self.num_records > 0 and self.num_faults == 0


def kind_of(fields: Mapping[str, Any], format: RecordFormat) -> Kind:
    """Return the kind of training examples that a record's fields can be used for."""
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


def survey(
    source: str,
    *,
    names: FieldNames | None = None,
    kind: Kind | None = None,
    tokenizer: Tokenizer | None = None,
    system_prompt: str | None = None,
    others: Mapping[str, FieldNames | None] | None = None,
    has_answers: bool = True,
    max_tokens: int | None = None,
    drops_long: bool = False,
) -> Survey:
    """Return a survey of all records of a data source. Records with errors are counted, and the survey continues.

    Without a tokenizer, records are only read, and lengths are in characters. `others` has sources whose prompts must
    not occur here, for example held-out sets, with their field names. Without `has_answers`, problems need no gold
    answer. A record with more than `max_tokens` (None: MAX_TOKENS) is an error, or with `drops_long` only counted.
    Raises DataError for a missing source.
    """
    prompts = {other: _prompts_of(other, own, system_prompt) for other, own in (others or {}).items()}
    found: Survey | None = None
    lengths: list[int] = []
    seen: dict[bytes, str] = {}
    faults: dict[str, Fault] = {}
    labels: set[bool] = set()
    for record in _records(source, names, faults):
        if found is None:
            found = Survey(source, kind or kind_of(record.fields, record.format), record.format)
            found.num_overlaps = dict.fromkeys(prompts, 0)
        try:
            messages = _trained_messages(record, found.kind, system_prompt, has_answers)
            sequences = (
                _sequences(record, found.kind, tokenizer, system_prompt, has_answers, max_tokens) if tokenizer else []
            )
            # Rendered before it is counted: a faulty record has no length and no duplicates.
            prompt = _digest(_prompt_messages(record, found.kind, system_prompt))
        except DataError as error:
            if drops_long and isinstance(error, TooLongError):
                found.num_long += 1
            else:
                _note(faults, record.path, record.unit, record.line, error)
            continue
        found.num_records += 1
        labels.add(bool(record.value(record.format.label)))
        lengths.append(sum(map(len, sequences)) if tokenizer else len(json.dumps(messages, ensure_ascii=False)))
        place = f"{record.unit} {record.line}"
        if (earlier := seen.setdefault(_digest(messages), place)) != place:
            found.num_duplicates += 1
            found.duplicates += [f"{place} (as {earlier})"] * (len(found.duplicates) < MAX_LISTED_FAULTS)
        for other, known in prompts.items():
            if prompt in known:
                found.num_overlaps[other] += 1
                found.overlaps += [f"{place} ({other}, {known[prompt]})"] * (len(found.overlaps) < MAX_LISTED_FAULTS)
        if tokenizer is not None and not found.first:
            found.first = _shown(tokenizer, sequences[0])
    found = found or Survey(source, kind or "problems")
    if found.kind == "judged" and len(labels) == 1:
        text = f"{source}: {EQUAL_LABELS}"
        faults[text] = Fault(text, "")
    found.num_faults = sum(fault.count for fault in faults.values())
    found.num_different_faults, found.faults = len(faults), list(faults.values())[:MAX_LISTED_FAULTS]
    found.lengths = np.array(lengths, np.int64)
    return found


def _shown(tokenizer: Tokenizer, sequence: TrainingSequence) -> list[tuple[str, bool]]:
    """Return the text of a token sequence in pieces, each with whether it is trained."""
    borders = [0, *(np.flatnonzero(np.diff(sequence.loss_mask)) + 1).tolist(), len(sequence)]
    return [
        (str(tokenizer.decode(sequence.token_ids[start:end].tolist())), bool(sequence.loss_mask[start]))
        for start, end in pairwise(borders)
        if end > start
    ]


def _note(faults: dict[str, Fault], path: Path, unit: str, line: int, error: DataError) -> None:
    """Count an error of a row under its message, without the row's place."""
    place = f"{path}, {unit} {line}"
    # Without the place, equal faults of many rows have equal messages and are counted together.
    problem = str(error).removeprefix(f"{place}: ")
    if (known := faults.setdefault(problem, Fault(problem, place))).place == place:
        return
    known.count += 1
    known.further += [f"{unit} {line}"] * (len(known.further) < MAX_LISTED_PLACES)


def _records(source: str, names: FieldNames | None, faults: dict[str, Fault]) -> Iterator[Record]:
    """Yield the records of a source. Invalid rows, and files unreadable before their end, are counted as
    errors."""
    format: RecordFormat | None = None
    for path in data_files(source):
        try:
            for row in rows_of(path):
                try:
                    record = make_record(path, row, names, format)
                except DataError as error:
                    _note(faults, path, row.unit, row.number, error)
                    continue
                format = record.format
                yield record
        except DataError as error:
            # The rows after this fault cannot be read, but the source's other files can.
            faults[str(error)] = Fault(str(error), "")


def _prompts_of(source: str, names: FieldNames | None, system_prompt: str | None) -> dict[bytes, str]:
    """Return where each prompt of a source stands (file and line), keyed by the prompt's digest."""
    found: dict[bytes, str] = {}
    for record in _records(source, names, {}):
        kind = kind_of(record.fields, record.format)
        try:
            found.setdefault(_digest(_prompt_messages(record, kind, system_prompt)), f"{record.unit} {record.line}")
        except DataError:
            continue
    return found


def _prompt_messages(record: Record, kind: Kind, system_prompt: str | None) -> list[Mapping[str, Any]]:
    """Return the messages before the assistant's first one. For a pair they are the chosen answer's."""
    messages = pair_conversations(record, system_prompt)[0] if kind == "pairs" else record.prompt(system_prompt)
    first = next((place for place, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    return list(messages[:first])


def _trained_messages(record: Record, kind: Kind, system_prompt: str | None, has_answers: bool) -> list[Any]:
    """Return the parts of a record used for training, to recognise duplicates.

    Raises DataError for each record that a run would refuse, except for what only a tokenizer shows.
    """
    tools = record.tools()
    if kind == "problems":
        messages, answer = problem_parts(record, system_prompt=system_prompt, has_answer=has_answers)
        return [*messages, *([answer] if has_answers else []), *tools]
    if kind == "pairs":
        return [*map(list, pair_conversations(record, system_prompt)), *tools]
    if kind == "judged":
        messages, _ = judged_conversation(record, system_prompt)
        first = len(messages) - 1
    else:
        messages, first = conversation_messages(record, system_prompt), 0
    try:
        refuse_untrained(messages, first=first)
    except ValueError as error:
        raise record.error(str(error)) from error
    return [*messages, *tools]


def _sequences(
    record: Record,
    kind: Kind,
    tokenizer: Tokenizer,
    system_prompt: str | None,
    has_answers: bool,
    max_tokens: int | None,
) -> Sequence[TrainingSequence]:
    """Return a record as tokens. Raises DataError, and TooLongError above `max_tokens` (None: MAX_TOKENS)."""
    limit = max_tokens or MAX_TOKENS
    settings: dict[str, Any] = {"system_prompt": system_prompt}
    try:
        if kind == "pairs":
            return make_pair(record, tokenizer, max_tokens=limit, **settings)
        if kind == "judged":
            return make_judged(record, tokenizer, max_tokens=limit, **settings)
        if kind == "conversations":
            messages = conversation_messages(record, system_prompt)
            return make_conversation(record, tokenizer, messages, max_tokens=limit)
        problem = make_problem(record, 0, tokenizer, max_prompt_tokens=limit, has_answer=has_answers, **settings)
    except TooLongError as error:
        if max_tokens is not None:
            raise
        raise record.error(
            f"has more than {limit} tokens; a check with --recipe measures as many as the recipe allows", TooLongError
        ) from error
    tokens = np.array(problem.prompt_token_ids, np.int64)
    return [TrainingSequence(tokens, np.zeros(len(tokens), np.bool_))]


def _digest(value: Any) -> bytes:
    """Return the digest of a JSON value: 16 bytes, so that millions of prompts fit in memory."""
    return blake2b(json.dumps(value, ensure_ascii=False, sort_keys=True).encode(), digest_size=16).digest()
