"""Samples as tables of plain cells, for trackers that show tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Cell = str | int | float | bool | None

_ROWS_SHOWN = 16
"""Rows of a table: samples of one data set."""


class SampleTable(NamedTuple):
    """First samples of one data set in one step, as rows of cells."""

    name: str
    columns: list[str]
    rows: list[list[Cell]]


def sample_tables(records: Sequence[Mapping[str, Any]]) -> Iterator[SampleTable]:
    """Yield a table `samples/SET` for each data set of a step's samples. Training samples have the set `train`."""
    by_set: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        by_set.setdefault(record.get("set", "train"), []).append(record)
    for name, set_records in by_set.items():
        columns = list(dict.fromkeys(field for record in set_records for field in record))
        rows = [[_cell(record.get(field)) for field in columns] for record in set_records[:_ROWS_SHOWN]]
        yield SampleTable(f"samples/{name}", columns, rows)


def _cell(value: object) -> Cell:
    return value if value is None or isinstance(value, (str, int, float)) else json.dumps(value, ensure_ascii=False)
