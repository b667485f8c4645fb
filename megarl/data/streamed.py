"""Records that stay on disk: read once, checked, and made into what trains each time that they are drawn."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Generic, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from megarl.data.records import Record, TooLongError, made_of
from megarl.types import Problem

Made = TypeVar("Made")
OnLong = Callable[[TooLongError], object]


class Collect(Protocol):
    """How the results of records are kept: all in memory, on disk, or only their number."""

    def __call__(
        self, records: Iterable[Record], make: Callable[[int, Record], Any], on_long: OnLong | None
    ) -> Sequence[Any]: ...


def in_memory(records: Iterable[Record], make: Callable[[int, Record], Made], on_long: OnLong | None) -> Sequence[Made]:
    """All results in a list. Errors as of `made_of`."""
    return list(made_of(records, make, on_long))


def counted(records: Iterable[Record], make: Callable[[int, Record], object], on_long: OnLong | None) -> Sequence[int]:
    """A sequence of as many numbers as there are results, none of which is kept. Errors as of `made_of`."""
    return range(sum(1 for _ in made_of(records, make, on_long)))


class Streamed(Sequence[Made], Generic[Made]):
    """Results of records that are made anew each time; the records are on disk, 16 bytes of each in memory.

    They are copied, as JSON lines, into a file of a folder that has no name there and goes with this object: so those
    of each kind of source can be read in any order, and a source may change meanwhile.
    """

    def __init__(
        self,
        records: Iterable[Record],
        make: Callable[[int, Record], Made],
        on_long: OnLong | None,
        *,
        folder: str | Path,
    ) -> None:
        """Reads and checks all records. Errors as of `made_of`, and OSError."""
        self._make = make
        self._file = TemporaryFile(dir=folder, prefix=".records_")  # noqa: SIM115  (it is open as long as this lives)
        self._starts, self._numbers = array("q"), array("q")
        self._paths: list[Path] = []
        self._format = None

        def keep(index: int, record: Record) -> None:
            make(index, record)
            self._format = record.format
            if not self._paths or self._paths[-1] != record.path:
                self._paths.append(record.path)
            place = len(self._paths) - 1, record.line, record.unit
            self._starts.append(self._file.tell())
            self._numbers.append(index)
            self._file.write(json.dumps([place, dict(record.fields)], ensure_ascii=False).encode() + b"\n")

        for _ in made_of(records, keep, on_long):
            pass

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, place: int) -> Made: ...
    @overload
    def __getitem__(self, place: slice) -> list[Made]: ...
    def __getitem__(self, place: int | slice) -> Made | list[Made]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        self._file.seek(self._starts[place])
        (path, line, unit), fields = json.loads(self._file.readline())
        assert self._format is not None
        return self._make(self._numbers[place], Record(self._paths[path], line, fields, self._format, unit))

    def values(self, field: str) -> Iterator[Any]:
        """The value of a field of each record; nothing is made of the record for it. Raises KeyError without one."""
        for start in self._starts:
            self._file.seek(start)
            _, fields = json.loads(self._file.readline())
            yield fields[field]

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The numbers of the records in their source, ascending: [records]."""
        return np.frombuffer(self._numbers, np.int64) if self._numbers else np.zeros(0, np.int64)


def numbers_of(problems: Sequence[Problem]) -> NDArray[np.int64]:
    """The `index` of each problem: [problems]; none of them is made for it."""
    if isinstance(problems, Streamed):
        return problems.numbers
    return np.fromiter((problem.index for problem in problems), np.int64, len(problems))


def values_of(problems: Sequence[Problem], field: str) -> Iterator[Any]:
    """The value of a field of each problem's record; those on disk are not made into problems for it."""
    if isinstance(problems, Streamed):
        return problems.values(field)
    return (problem.record[field] for problem in problems)


class Places:
    """The places of problems in a sequence by their `index`."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._numbers = numbers_of(problems)
        self._order = np.argsort(self._numbers, kind="stable")

    def get(self, index: int) -> int | None:
        """The place of the problem with this index; None without one."""
        found = int(np.searchsorted(self._numbers, index, sorter=self._order))
        if found == len(self._numbers) or self._numbers[self._order[found]] != index:
            return None
        return int(self._order[found])
