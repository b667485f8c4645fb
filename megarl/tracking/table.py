"""The table of all metrics: names, units and meanings, read from where each is made.

A module that makes metrics lists them in a literal `METRICS`, name -> (unit, meaning). None of the modules is imported:
some need torch, and a metric's name is asked for where there is none.

Parts of a name in capitals stand for any: `time/PHASE_seconds`, `val/SET/accuracy`; OWN for one or several parts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
TABLE = "METRICS"
_PLACEHOLDER = re.compile(r"[A-Z]+")


@dataclass(frozen=True, slots=True)
class Row:
    """A metric, or all of a pattern of names."""

    name: str
    unit: str
    meaning: str
    module: str
    """The module that makes it."""

    @property
    def pattern(self) -> re.Pattern[str]:
        """The names that the row is about."""
        parts = re.split(f"({_PLACEHOLDER.pattern})", self.name)
        any_of = {"OWN": ".+"}
        return re.compile(
            "".join(any_of.get(part, "[^/]+") if _PLACEHOLDER.fullmatch(part) else re.escape(part) for part in parts)
        )


@cache
def rows() -> tuple[Row, ...]:
    """All rows, by name."""
    found = [row for path in sorted(PACKAGE.rglob("*.py")) for row in _rows_of(path)]
    return tuple(sorted(found, key=lambda row: row.name))


def find(name: str) -> Row | None:
    """The row of a metric as it was logged; None for one of somebody's own, such as those of a custom loss.

    In a mixture and in evaluations other metrics' names stand behind `environment/SOURCE/` and `val/SET/`.
    """
    matching = [row for row in rows() if row.pattern.fullmatch(name)]
    best = min(matching, key=_generality, default=None)
    group, _, rest = name.partition("/")
    _, _, rest = rest.partition("/")
    if rest and group == "environment" and (best is None or "OWN" in best.name):
        own = (find(prefix + rest) for prefix in ("", "rollout/", "environment/"))
        return next((row for row in own if row is not None and "OWN" not in row.name), best)
    if best is None and group == "val" and rest.startswith("reward/"):
        return find(rest)
    return best


def _generality(row: Row) -> tuple[bool, int, int]:
    """The less, the more precisely a row's name says which metrics it is about."""
    return "OWN" in row.name, len(_PLACEHOLDER.findall(row.name)), -len(row.name)


def _rows_of(path: Path) -> Iterator[Row]:
    text = path.read_text(encoding="utf-8")
    if f"\n{TABLE} = " not in text:
        return
    module = ".".join(("megarl", *path.relative_to(PACKAGE).with_suffix("").parts))
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == TABLE for t in node.targets):
            for name, (unit, meaning) in ast.literal_eval(node.value).items():
                yield Row(name, unit, meaning, module)
