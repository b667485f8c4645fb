"""Values of removed recipe fields: those that were not set are dropped. The table is `foreign.REMOVED`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.config.hints.foreign import REMOVED
from megarl.config.reading.explaining import printable, reference_around, shorten_value
from megarl.config.reading.merging import Merged
from megarl.config.reading.validating import section_around


def drop_removed_fields(merged: Merged, path: Path, *, is_of_run: bool) -> list[str]:
    """Drop removed fields that were not set. Values are removed from `merged`. Returns the notices.

    The config.yaml of a run folder lists all fields, so there a removed field is dropped even if it was set.
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
        # As written: a value from the environment may be secret.
        text = shorten_value(reference_around(place, merged.references) or printable(value, place, merged.references))
        del section[place[-1]]
        merged.references.pop(place, None)
        if value is not None:
            notices.append(f"{path}: {field} = {text}: dropped, the field was removed; {replacement}")
        elif not is_of_run:
            notices.append(f"{path}: {field}: dropped, the field was removed")
    return notices
