"""Table of all metrics: names, units and meanings, read from the modules computing them.

Each module lists its metrics in a literal `METRICS`: name -> (unit, meaning). The modules are parsed and not imported,
because some need torch and the table must work without it.

Parts of a name in capitals are placeholders: `time/PHASE_seconds`, `val/SET/accuracy`. OWN stands for one or several
parts.
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
    """Metric, or all metrics matching a pattern."""

    name: str
    unit: str
    meaning: str
    module: str
    """Module computing it."""

    @property
    def pattern(self) -> re.Pattern[str]:
        """Regular expression for the names described by this row."""
        parts = re.split(f"({_PLACEHOLDER.pattern})", self.name)
        # Only OWN may contain slashes.
        any_of = {"OWN": ".+"}
        return re.compile(
            "".join(any_of.get(part, "[^/]+") if _PLACEHOLDER.fullmatch(part) else re.escape(part) for part in parts)
        )


@cache
def rows() -> tuple[Row, ...]:
    """Return all rows, sorted by name."""
    found = [row for path in sorted(PACKAGE.rglob("*.py")) for row in _rows_of(path)]
    return tuple(sorted(found, key=lambda row: row.name))


def find(name: str) -> Row | None:
    """Return the row for a logged metric. None: it is user-defined, for example by a custom loss.

    In mixtures and evaluations, names of other metrics follow `environment/SOURCE/` and `val/SET/`.
    """
    matching = [row for row in rows() if row.pattern.fullmatch(name)]
    best = min(matching, key=_generality, default=None)
    group, _, rest = name.partition("/")
    _, _, rest = rest.partition("/")
    if rest and group == "environment" and (best is None or "OWN" in best.name):
        # A source's metrics are logged without their usual prefix, so each is tried.
        own = (find(prefix + rest) for prefix in ("", "rollout/", "environment/"))
        return next((row for row in own if row is not None and "OWN" not in row.name), best)
    if best is None and group == "val" and rest.startswith("reward/"):
        return find(rest)
    return best


def _generality(row: Row) -> tuple[bool, int, int]:
    """Return a sort key: smaller for more specific rows."""
    return "OWN" in row.name, len(_PLACEHOLDER.findall(row.name)), -len(row.name)


def _rows_of(path: Path) -> Iterator[Row]:
    """Yield the rows of a module's METRICS."""
    text = path.read_text(encoding="utf-8")
    if f"\n{TABLE} = " not in text:
        return
    module = ".".join(("megarl", *path.relative_to(PACKAGE).with_suffix("").parts))
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == TABLE for t in node.targets):
            for name, (unit, meaning) in ast.literal_eval(node.value).items():
                yield Row(name, unit, meaning, module)
