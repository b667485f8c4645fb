"""Verdicts on answers: the tables in `verdicts/`.

`development` and `everyday` are the tables that the rules were made with. `held_back`, `second_round` and
`everyday_held_back` were written from mathematical judgement alone, before the rules were run on them. So was
`third_round`, without 22 right answers that the rules still refuse, and without 5 that are a matter of convention.

`fourth_round` has what models write as final answers: units, dates, ranges, congruences, boxes in texts, in the forms
of common data sets. Right answers that the rules still refuse are left out.

`generated` has pairs whose verdicts follow from their construction: answers of 80 kinds in random numbers, written
again in other forms, and changed by one step. Right answers that the rules still refuse are left out.

A line of a JSON table is {"gold", "right": [...], "wrong": [...]}. A line of a TSV table is T or F, the gold answer and
an answer; lines with # are headings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TABLES = (
    "development",
    "held_back",
    "second_round",
    "everyday",
    "everyday_held_back",
    "third_round",
    "fourth_round",
    "generated",
)
_FOLDER = Path(__file__).parent / "verdicts"


@dataclass(frozen=True, slots=True)
class Pair:
    """An answer to a problem with a gold answer, and whether it is right."""

    gold: str
    answer: str
    is_right: bool


def pairs(table: str) -> list[Pair]:
    path = _FOLDER / f"{table}.jsonl"
    if path.is_file():
        return list(_json_pairs(path))
    return list(_tsv_pairs(_FOLDER / f"{table}.tsv"))


def _json_pairs(path: Path) -> Iterator[Pair]:
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield from (Pair(row["gold"], answer, True) for answer in row["right"])
        yield from (Pair(row["gold"], answer, False) for answer in row["wrong"])


def _tsv_pairs(path: Path) -> Iterator[Pair]:
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            verdict, gold, answer = line.split("\t")
            yield Pair(gold, answer, verdict == "T")
