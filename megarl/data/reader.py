"""Reads data sources: files become records, and records become training examples.

Every error names the file and the line or row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from megarl.data.formats import FieldNames, RecordFormat
from megarl.data.record_fields import unread_field
from megarl.data.records import BY_FORMAT, Record, TooLongError
from megarl.data.sources.rows import Row, data_files, rows_of
from megarl.files.strict_json import shown
from megarl.types import DataError

Made = TypeVar("Made")
Example = TypeVar("Example", covariant=True)
OnLong = Callable[[TooLongError], object]
"""Called with the error of each record that is left out because it is too long."""
OnFault = Callable[[DataError, Path, str], object]
"""Called with an error, its file, and its place in the file (`line 7`). Empty place: the file's rest is unreadable."""


class Kind(Protocol[Example]):
    """A kind of training examples, with the settings for making them."""

    is_judged: ClassVar[bool]
    """Whether each record has a label, good or bad. A source then needs both."""

    def make(self, index: int, record: Record) -> Example:
        """Return the training example of record number `index` of its source, from 0.

        Raises DataError, with the line, for an invalid record, and TooLongError for too many tokens.
        """
        ...


class Collect(Protocol):
    """Function that applies `make` to each record, and returns the results as a sequence.

    `in_memory` returns a list. `streamed.Streamed` makes a result again from disk at each access. `collect_count`
    returns a sequence of the right length without results.
    """

    def __call__(
        self, records: Iterable[Record], make: Callable[[int, Record], Any], on_long: OnLong | None
    ) -> Sequence[Any]: ...


def read_examples(
    source: str | Path,
    kind: Kind[Example],
    *,
    names: FieldNames | None = None,
    on_long: OnLong | None = None,
    collect: Collect | None = None,
) -> Sequence[Example]:
    """Return the training examples of a data source, in the sequence made by `collect` (default: a list).

    Raises DataError, with the line, for an invalid record, and for judged answers that are all good or all bad. A
    record with too many tokens is never truncated: its error goes to `on_long`, or is raised without `on_long`.
    """
    labels: set[bool] = set()

    def make(index: int, record: Record) -> Example:
        example = kind.make(index, record)
        if kind.is_judged:
            labels.add(label_of(record))
        return example

    examples = (collect or in_memory)(read_records(source, names), make, on_long)
    if kind.is_judged and len(labels) < 2:
        raise DataError(equal_labels_text(source))
    return examples


def label_of(record: Record) -> bool:
    return bool(record.value(record.format.label))


def equal_labels_text(source: str | Path) -> str:
    """Return the error for a source with only good or only bad answers."""
    return f"{source}: all labels are the same; the loss kto needs good and bad answers, so add the other kind"


def in_memory(records: Iterable[Record], make: Callable[[int, Record], Made], on_long: OnLong | None) -> Sequence[Made]:
    """Return all results in a list. Raises the errors of `make_results`."""
    return list(make_results(records, make, on_long))


def collect_count(
    records: Iterable[Record], make: Callable[[int, Record], object], on_long: OnLong | None
) -> Sequence[int]:
    """Return a sequence of the right length without items. Raises the errors of `make_results`."""
    return range(sum(1 for _ in make_results(records, make, on_long)))


def make_results(
    records: Iterable[Record],
    make: Callable[[int, Record], Made],
    on_long: OnLong | None = None,
    on_fault: OnFault | None = None,
) -> Iterator[Made]:
    """Yield the result of `make` for each record and its number, counted from 0.

    Errors of records with too many tokens go to `on_long`, other errors and their place to `on_fault`. Without these
    functions the errors are raised.
    """
    for index, record in enumerate(records):
        try:
            result = make(index, record)
        except DataError as error:
            if on_long is not None and isinstance(error, TooLongError):
                on_long(error)
            elif on_fault is not None:
                on_fault(error, record.path, f"{record.unit} {record.line}")
            else:
                raise
        else:
            yield result


def read_records(
    source: str | Path, names: FieldNames | None = None, on_fault: OnFault | None = None
) -> Iterator[Record]:
    """Yield the records of a data source in order. Blank lines are skipped.

    Without `names`, the first record shows the format. Raises DataError if the source is missing or empty, or if a row
    is not a JSON object. With `on_fault`, only a missing source is raised: reading continues with the next row or file.
    """
    format: RecordFormat | None = None
    for path in data_files(source):
        try:
            for row in rows_of(path):
                try:
                    record = _make_record(path, row, names, format)
                except DataError as error:
                    if on_fault is None:
                        raise
                    on_fault(error, path, f"{row.unit} {row.number}")
                    continue
                format = record.format
                yield record
        except DataError as error:
            if on_fault is None:
                raise
            # The rows after this fault cannot be read, but the source's other files can.
            on_fault(error, path, "")
    if format is None and on_fault is None:
        raise DataError(f"{source}: the file holds no records; write one JSON object per line")


def _make_record(path: Path, row: Row, names: FieldNames | None, format: RecordFormat | None) -> Record:
    """Return the record in a row. `format` None: the row is the source's first, and shows the format.

    Raises DataError for a row that is not a JSON object, and for an unread field that would change the training.
    """
    if isinstance(row.value, DataError):
        raise row.value
    if not isinstance(row.value, dict):
        location = f"{path}, {row.unit} {row.number}"
        raise DataError(
            f"{location}: {shown(row.value)} is not a JSON object; each record must be an object with named fields"
        )
    # A column may be empty in this row only, so the columns count as field names too.
    format = format or (names or BY_FORMAT).format_of({**dict.fromkeys(row.columns), **row.value})
    record = Record(path, row.number, row.value, format, row.unit, names or BY_FORMAT)
    if (fault := unread_field(row.value, format)) is not None:
        raise record.error(fault)
    return record
