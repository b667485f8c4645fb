"""Verdicts on answers: the tables in `verdicts/`, one gold answer a line with its right and its wrong answers.

`development` is the table that the rules were made with. `held_back` and `second_round` were written from mathematical
judgement alone, before the rules were run on them. A line is {"gold", "right": [...], "wrong": [...]}.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

TABLES = ("development", "held_back", "second_round")
_FOLDER = Path(__file__).parent / "verdicts"


@dataclass(frozen=True, slots=True)
class Pair:
    """An answer to a problem with a gold answer, and whether it is right."""

    gold: str
    answer: str
    is_right: bool


def pairs(table: str) -> list[Pair]:
    found: list[Pair] = []
    for line in (_FOLDER / f"{table}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found += [Pair(row["gold"], answer, True) for answer in row["right"]]
        found += [Pair(row["gold"], answer, False) for answer in row["wrong"]]
    return found
