"""Survey of a data source before training: errors, lengths, duplicates, overlap with other sources."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import chain, islice, pairwise, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from megarl.data.formats import FieldNames, RecordFormat
from megarl.data.kinds import KINDS, AnyKind, KindName, kind_of
from megarl.data.kinds.preferences import Pairs
from megarl.data.kinds.problems import Problems
from megarl.data.reader import equal_labels_text, label_of, make_results, read_records
from megarl.data.records import Record, TooLongError, find_undescribed_tool
from megarl.findings import Finding
from megarl.types import DataError, TrainingSequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

MAX_TOKENS = 1 << 17
"""Maximum number of tokens of a record, if no recipe limits it. Encoding megabytes takes minutes."""
MAX_LISTED_FAULTS = 20
"""Maximum number of errors, of duplicates and of overlaps listed. All are counted."""
MAX_LISTED_PLACES = 5
"""Maximum number of records listed for an error, after the first."""


@dataclass(slots=True)
class _RepeatedError:
    """An error with the same message in one or more records."""

    problem: str
    place: str
    """First record with the error: `train.jsonl, line 7`. Empty: the error is about a whole file."""
    further_places: list[str] = field(default_factory=list)
    """Places of the next records with this error, at most `MAX_LISTED_PLACES`: `line 8`."""
    count: int = 1

    @property
    def finding(self) -> Finding:
        ellipsis = ", ..." if self.count - 1 > len(self.further_places) else ""
        other_records = (
            f" (and {self.count - 1} more: {', '.join(self.further_places)}{ellipsis})" if self.further_places else ""
        )
        return Finding("bad", self.place, f"{self.problem}{other_records}", exit_code=DataError.exit_code)


@dataclass(slots=True)
class Survey:
    source: str
    kind: KindName
    format: RecordFormat | None = None
    num_records: int = 0
    """Number of records without an error."""
    num_long: int = 0
    """Number of records left out as too long (data.overlong: drop)."""
    num_faults: int = 0
    faults: list[Finding] = field(default_factory=list)
    """The first different errors with their records, at most `MAX_LISTED_FAULTS`."""
    num_different_faults: int = 0
    lengths: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Length of each prompt, conversation or pair (both answers together), in tokens; without a tokenizer, in
    characters.
    """
    num_duplicates: int = 0
    duplicates: list[str] = field(default_factory=list)
    """Records whose trained content equals an earlier record's: `line 7 (as line 3)`."""
    num_undescribed_calls: int = 0
    """Number of records with a trained call to a tool that they neither list nor name before."""
    undescribed_calls: list[str] = field(default_factory=list)
    """The first of these records, each with its tool: `line 7 (add)`."""
    num_overlaps: dict[str, int] = field(default_factory=dict)
    """Number of records whose prompt another source has too, by that source."""
    overlaps: list[str] = field(default_factory=list)
    first: list[tuple[str, bool]] = field(default_factory=list)
    """Text of the first record in pieces: (text, whether its tokens are trained)."""

    @property
    def is_sound(self) -> bool:
        return self.num_records > 0 and self.num_faults == 0


def survey(
    source: str,
    *,
    names: FieldNames | None = None,
    kind: KindName | None = None,
    tokenizer: Tokenizer | None = None,
    system_prompt: str | None = None,
    other_sources: Mapping[str, FieldNames | None] | None = None,
    has_answers: bool = True,
    max_tokens: int | None = None,
    drops_long: bool = False,
) -> Survey:
    """Return a survey of all records of a data source. Records with errors are counted, and the survey continues.

    Without a tokenizer, records are only read, and lengths are in characters. `other_sources` are held-out sets with
    their field names; this source must not repeat their prompts. Without `has_answers`, problems need no gold answer. A
    record above `max_tokens` (None: MAX_TOKENS) is an error, or with `drops_long` only counted. Raises DataError for a
    missing source.
    """
    # Prompts of held-out sets, to find overlaps.
    prompts = {
        other_source: _places_by_prompt(other_source, other_names, system_prompt)
        for other_source, other_names in (other_sources or {}).items()
    }
    faults: dict[str, _RepeatedError] = {}
    on_fault = partial(_count_error, faults)
    # The first record shows the kind and the format of all.
    records = read_records(source, names, on_fault)
    first_record = next(records, None)
    if first_record is None:
        return _add_faults(Survey(source, kind or "problems"), faults)
    result = Survey(source, kind or kind_of(first_record.fields, first_record.format), first_record.format)
    result.num_overlaps = dict.fromkeys(prompts, 0)
    read_record = _RecordReader(result.kind, tokenizer, system_prompt, has_answers, max_tokens)

    def count_long(_: TooLongError) -> None:
        result.num_long += 1

    # Read each record once, and compare its digest with those before.
    lengths: list[int] = []
    first_places: dict[bytes, str] = {}
    labels: set[bool] = set()
    all_records = chain([first_record], records)
    for example in make_results(all_records, read_record, count_long if drops_long else None, on_fault):
        labels.add(label_of(example.record))
        lengths.append(example.length)
        _count_example(result, example, first_places, prompts)
        if tokenizer is not None and not result.first:
            result.first = _split_by_mask(tokenizer, example.sequences[0])
    if KINDS[result.kind].is_judged and len(labels) == 1:
        text = equal_labels_text(source)
        faults[text] = _RepeatedError(text, "")
    result.lengths = np.array(lengths, np.int64)
    return _add_faults(result, faults)


def _count_example(
    result: Survey, example: _Surveyed, first_places: dict[bytes, str], prompts: Mapping[str, Mapping[bytes, str]]
) -> None:
    """Count a record's example in a survey: whether it repeats an earlier record, or a prompt of another source.

    `first_places` has the place of each record so far by its digest, `prompts` those of the other sources' prompts.
    """
    record = example.record
    result.num_records += 1
    place = f"{record.unit} {record.line}"
    if (first_place := first_places.setdefault(example.digest, place)) != place:
        result.num_duplicates += 1
        if len(result.duplicates) < MAX_LISTED_FAULTS:
            result.duplicates.append(f"{place} (as {first_place})")
    if example.undescribed_tool is not None:
        result.num_undescribed_calls += 1
        if len(result.undescribed_calls) < MAX_LISTED_FAULTS:
            result.undescribed_calls.append(f"{place} ({example.undescribed_tool})")
    for other_source, places in prompts.items():
        if example.prompt in places:
            result.num_overlaps[other_source] += 1
            if len(result.overlaps) < MAX_LISTED_FAULTS:
                result.overlaps.append(f"{place} ({other_source}, {places[example.prompt]})")


def _add_faults(result: Survey, faults: Mapping[str, _RepeatedError]) -> Survey:
    result.num_faults = sum(fault.count for fault in faults.values())
    result.num_different_faults = len(faults)
    result.faults = [fault.finding for fault in islice(faults.values(), MAX_LISTED_FAULTS)]
    return result


@dataclass(frozen=True, slots=True)
class _Surveyed:
    """Counts and digests of a record without an error."""

    record: Record
    length: int
    """Tokens in all sequences. Without a tokenizer: characters."""
    digest: bytes
    """Digest of the content used for training."""
    prompt: bytes
    """Digest of the messages before the assistant's first one."""
    sequences: Sequence[TrainingSequence]
    """Empty without a tokenizer."""
    undescribed_tool: str | None
    """Tool of a trained call that the record neither lists nor names before. None: no such call."""


class _RecordReader:
    """Reads one record for the survey. Raises DataError for each record that a run would refuse.

    Without a tokenizer, errors that only a tokenizer shows are not noticed.
    """

    def __init__(
        self,
        kind: KindName,
        tokenizer: Tokenizer | None,
        system_prompt: str | None,
        has_answers: bool,
        max_tokens: int | None,
    ) -> None:
        self._has_tokenizer = tokenizer is not None
        self._has_limit = max_tokens is not None
        self._max_tokens = max_tokens or MAX_TOKENS
        self._kind = _make_record_kind(
            kind,
            tokenizer=tokenizer,
            system_prompt=system_prompt,
            has_answers=has_answers,
            max_tokens=self._max_tokens,
        )

    def __call__(self, index: int, record: Record) -> _Surveyed:
        """Check one record, and return what the survey compares and counts."""
        tools = record.tools()
        trained_parts = self._kind.parts(record)
        parts = [*trained_parts, *tools]
        sequences = self._make_sequences(index, record) if self._has_tokenizer else ()
        # The prompt is read before the record is counted: a faulty record has no length and no duplicates.
        prompt = _digest(_messages_before_answer(self._kind.prompt(record)))
        length = sum(map(len, sequences)) if self._has_tokenizer else len(json.dumps(parts, ensure_ascii=False))
        undescribed_tool = None if tools else self._find_undescribed_tool(trained_parts)
        return _Surveyed(record, length, _digest(parts), prompt, sequences, undescribed_tool)

    def _find_undescribed_tool(self, trained_parts: Sequence[Any]) -> str | None:
        """Return a tool that a trained message calls and no earlier message describes; None: there is none."""
        # Messages of problems are prompts: they are not trained.
        if isinstance(self._kind, Problems):
            return None
        # Of a pair, the chosen conversation: the rejected one may be rejected for its call.
        return find_undescribed_tool(trained_parts[0] if isinstance(self._kind, Pairs) else trained_parts)

    def _make_sequences(self, index: int, record: Record) -> Sequence[TrainingSequence]:
        kind: Any = self._kind
        try:
            return kind.sequences(kind.make(index, record))
        except TooLongError as error:
            if self._has_limit:
                raise
            raise record.error(
                f"has more than {self._max_tokens} tokens; a check with --recipe measures as many as the recipe allows",
                TooLongError,
            ) from error


def _make_record_kind(
    name: KindName, *, tokenizer: Tokenizer | None, system_prompt: str | None, has_answers: bool, max_tokens: int
) -> AnyKind:
    # The other kinds have no gold answers.
    options: dict[str, Any] = {"has_answers": has_answers} if name == "problems" else {}
    # Without a tokenizer, the kind only reads records. It makes no training examples of them.
    return KINDS[name](
        tokenizer=cast("Tokenizer", tokenizer), system_prompt=system_prompt, max_tokens=max_tokens, **options
    )


def _split_by_mask(tokenizer: Tokenizer, sequence: TrainingSequence) -> list[tuple[str, bool]]:
    """Return a sequence's text in pieces: (text, whether it is trained)."""
    borders = [0, *(np.flatnonzero(np.diff(sequence.loss_mask)) + 1).tolist(), len(sequence)]
    return [
        (str(tokenizer.decode(sequence.token_ids[start:end].tolist())), bool(sequence.loss_mask[start]))
        for start, end in pairwise(borders)
        if end > start
    ]


def _count_error(faults: dict[str, _RepeatedError], error: DataError, path: Path, place: str) -> None:
    """Count an error under its message. An empty place: the error is about the whole file."""
    if not place:
        faults[str(error)] = _RepeatedError(str(error), "")
        return
    # Without the place, equal faults of many rows have equal messages and are counted together.
    problem = str(error).removeprefix(f"{path}, {place}: ")
    fault = faults.setdefault(problem, _RepeatedError(problem, f"{path}, {place}"))
    # The fault has just been created with this place.
    if fault.place == f"{path}, {place}":
        return
    fault.count += 1
    if len(fault.further_places) < MAX_LISTED_PLACES:
        fault.further_places.append(place)


def _places_by_prompt(source: str, names: FieldNames | None, system_prompt: str | None) -> dict[bytes, str]:
    """Return the place (file and line) of each prompt of a source, keyed by the prompt's digest."""
    places: dict[bytes, str] = {}
    for record in read_records(source, names, lambda *_: None):
        kind = _make_record_kind(
            kind_of(record.fields, record.format),
            tokenizer=None,
            system_prompt=system_prompt,
            has_answers=True,
            max_tokens=MAX_TOKENS,
        )
        # The survey of that source reports the errors of its records.
        with suppress(DataError):
            places.setdefault(_digest(_messages_before_answer(kind.prompt(record))), f"{record.unit} {record.line}")
    return places


def _messages_before_answer(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return list(takewhile(lambda message: message["role"] != "assistant", messages))


def _digest(value: Any) -> bytes:
    return blake2b(json.dumps(value, ensure_ascii=False, sort_keys=True).encode(), digest_size=16).digest()
