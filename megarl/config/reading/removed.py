"""Drops removed recipe fields (`foreign.REMOVED`) without a value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.config.hints.foreign import REMOVED
from megarl.config.reading.explaining import plain_value, shorten_value
from megarl.config.reading.merging import Merged
from megarl.config.reading.validating import section_around


def drop_removed_fields(merged: Merged, path: Path, *, is_of_run: bool) -> list[str]:
    """Drop removed fields without a value (null) from `merged`. Returns the notices.

    The config.yaml of a run folder (`is_of_run`) lists all fields, so there a removed field is dropped even with a
    value.
    """
    notices = []
    for field, replacement in REMOVED.items():
        place: Any = tuple(field.split("."))
        section = section_around(merged.values, place)
        if section is None:
            continue
        value = section[place[-1]]
        if value is not None and not is_of_run:
            continue
        # The notice has the value as written: a value from the environment may be secret.
        text = shorten_value(plain_value(value, place, merged.references))
        del section[place[-1]]
        merged.references.pop(place, None)
        if value is not None:
            notices.append(f"{path}: {field} = {text}: dropped, the field was removed; {replacement}")
        elif not is_of_run:
            notices.append(f"{path}: {field}: dropped, the field was removed")
    return notices
