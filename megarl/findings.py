"""Results of checks: of recipes, nodes, machines, data sources and running trainings."""

from __future__ import annotations

from typing import Literal, NamedTuple

from megarl.types import ConfigError

Level = Literal["good", "absent", "warning", "bad"]
"""State found by a check. `absent`: not there, and not needed. `bad`: a run cannot start, or not run well."""


class Finding(NamedTuple):
    """One result of a check. Each command prints it in its own way; `str` is one line."""

    level: Level
    place: str
    """Subject: a recipe field with its value, a file and line, a node, a package. May be empty."""
    text: str
    remedy: str = ""
    """Advice to the user. Empty: there is none, or `text` has it."""
    exit_code: int = ConfigError.exit_code
    """Exit code of a command, if this finding ends it."""

    def __str__(self) -> str:
        return f"{self.place}: {self.advice}" if self.place else self.advice

    @property
    def advice(self) -> str:
        """Text and remedy, without the place."""
        return f"{self.text}; {self.remedy}" if self.remedy else self.text


def finding_of_line(level: Level, line: str, exit_code: int = ConfigError.exit_code) -> Finding:
    """Return the finding in a line `PLACE: TEXT`. Its `str` is the line."""
    # A line without a place is all text.
    # The separator has a space, because FILE:LINE has a colon of its own.
    place, colon, text = line.partition(": ")
    return Finding(level, place, text, exit_code=exit_code) if colon else Finding(level, "", line, exit_code=exit_code)
