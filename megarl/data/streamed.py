"""Data sets on disk. Records are validated once at the start, and tokenised at each draw."""

from __future__ import annotations

import json
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from megarl.data.reader import OnLong, make_results
from megarl.data.records import Record
from megarl.types import Problem

Made = TypeVar("Made")


class Streamed(Sequence[Made], Generic[Made]):
    """A sequence of results (tokenised examples), computed from records on disk at each access.

    Each record takes 16 bytes of memory. The records are copied as JSON lines into an unnamed temporary file, deleted
    with this object. So every kind of source allows random access, and may change during the run.
    """

    def __init__(
        self,
        records: Iterable[Record],
        make: Callable[[int, Record], Made],
        on_long: OnLong | None,
        *,
        folder: str | Path,
    ) -> None:
        """Make each record's example once, to validate it, and store the records in a file in `folder`.

        Examples that are too long are left out and reported to `on_long`. Raises OSError and the errors of `make`.
        """
        self._make = make
        self._file = TemporaryFile(dir=folder, prefix=".records_")  # noqa: SIM115  (it is open as long as this lives)
        # Errors of records refer to this object, so the collector may free it long after the file. Only the finaliser
        # closes the file first. Not at exit: a forked process would move the offset that it shares with its parent.
        weakref.finalize(self, self._file.close).atexit = False
        self._starts, self._numbers = array("q"), array("q")
        self._paths: list[Path] = []
        self._format = None

        def store_record(index: int, record: Record) -> None:
            make(index, record)
            self._format = record.format
            # Each path is stored once: records of a file follow each other.
            if not self._paths or self._paths[-1] != record.path:
                self._paths.append(record.path)
            # The location is stored too, so that a later error of `make` names the record's line.
            location = len(self._paths) - 1, record.line, record.unit
            self._starts.append(self._file.tell())
            self._numbers.append(index)
            self._file.write(json.dumps([location, dict(record.fields)], ensure_ascii=False).encode() + b"\n")

        for _ in make_results(records, store_record, on_long):
            pass

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> Made: ...
    @overload
    def __getitem__(self, index: slice) -> list[Made]: ...
    def __getitem__(self, index: int | slice) -> Made | list[Made]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        self._file.seek(self._starts[index])
        (path, line, unit), fields = json.loads(self._file.readline())
        assert self._format is not None
        return self._make(self._numbers[index], Record(self._paths[path], line, fields, self._format, unit))

    def values(self, field: str) -> Iterator[Any]:
        """Yield a field's value of each record, without computing results. Raises KeyError for a missing field."""
        for file_offset in self._starts:
            self._file.seek(file_offset)
            _, fields = json.loads(self._file.readline())
            yield fields[field]

    @property
    def numbers(self) -> NDArray[np.int64]:
        """Return each record's number in its source, ascending: [records]."""
        return np.frombuffer(self._numbers, np.int64) if self._numbers else np.zeros(0, np.int64)


def numbers_of(problems: Sequence[Problem]) -> NDArray[np.int64]:
    """Return the `index` of each problem: [problems].

    A loop over problems on disk would read and tokenise each, so their stored numbers are used.
    """
    if isinstance(problems, Streamed):
        return problems.numbers
    return np.fromiter((problem.index for problem in problems), np.int64, len(problems))


def values_of(problems: Sequence[Problem], field: str) -> Iterator[Any]:
    """Yield a field's value of each problem's record.

    A loop over problems on disk would tokenise each, so only their records are read.
    """
    if isinstance(problems, Streamed):
        return problems.values(field)
    return (problem.record[field] for problem in problems)


class Places:
    """Positions of problems in a sequence, keyed by their `index`."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._numbers = numbers_of(problems)
        # Binary search over two arrays takes 16 bytes a problem; a dict takes several times more.
        self._order = np.argsort(self._numbers, kind="stable")

    def get(self, index: int) -> int | None:
        rank = int(np.searchsorted(self._numbers, index, sorter=self._order))
        if rank == len(self._numbers) or self._numbers[self._order[rank]] != index:
            return None
        return int(self._order[rank])
