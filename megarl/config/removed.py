"""Values of removed recipe fields: those that were not set are dropped. The table is `foreign.REMOVED`."""

from __future__ import annotations

from pathlib import Path

from megarl.config.foreign import REMOVED
from megarl.config.merging import Merged
from megarl.config.validating import take_value


def drop_removed_fields(merged: Merged, path: Path, *, is_of_run: bool) -> list[str]:
    """Drop removed fields that were not set. Values are removed from `merged`. Returns the notices.

    The config.yaml of a run folder lists all fields, so there a removed field is dropped even if it was set.
    """
    notices = []
    for field, replacement in REMOVED.items():
        *sections, name = field.split(".")
        section = merged.values
        for part in sections:
            section = section.get(part) if isinstance(section, dict) else None
        if not isinstance(section, dict) or name not in section:
            continue
        value = section[name]
        if value is not None and not is_of_run:
            continue
        take_value(merged.values, field.split("."))
        if value is not None:
            notices.append(f"{path}: {field} = {value!r}: dropped, the field was removed; {replacement}")
        elif not is_of_run:
            notices.append(f"{path}: {field}: dropped, the field was removed")
    return notices
