"""Results of checks: of recipes, nodes, machines, data sources and running trainings."""

from __future__ import annotations

from typing import Literal, NamedTuple

from megarl.types import ConfigError

Level = Literal["good", "absent", "warning", "bad"]
"""Severity of a finding. `absent`: missing, and not needed. `bad`: a run cannot start, or not run well."""


class Finding(NamedTuple):
    """One result of a check. `str` is its text on one line."""

    level: Level
    place: str
    """Subject: a recipe field with its value, a file and line, a node, a package. May be empty."""
    text: str
    remedy: str = ""
    """Advice to the user. Empty: none, or `text` contains it."""
    exit_code: int = ConfigError.exit_code
    """Exit code of a command, if this finding ends it."""

    def __str__(self) -> str:
        return f"{self.place}: {self.advice}" if self.place else self.advice

    @property
    def advice(self) -> str:
        """Text and remedy, without the place."""
        return f"{self.text}; {self.remedy}" if self.remedy else self.text


def finding_of_line(level: Level, line: str, exit_code: int = ConfigError.exit_code) -> Finding:
    """Return the finding of a line `PLACE: TEXT`, for example `trainer.tp = 3: does not divide 4`."""
    # The separator is colon and space, because a place FILE:LINE has a colon too. A line without it is all text.
    place, colon, text = line.partition(": ")
    return Finding(level, place, text, exit_code=exit_code) if colon else Finding(level, "", line, exit_code=exit_code)
