"""Fields of config.json of published models, so that a memory prediction needs no download.

`published.json` has the fields read by `shape_from_config`, copied from the Hub: for the models of recipes in
`launch/recipes/`, and the large models of other families.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PUBLISHED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
"""Fields of config.json, by the name on the Hugging Face Hub."""


def published_name(folder: str | Path) -> str | None:
    """Return the Hub name of the published model that has this folder's name (`models/Qwen3-14B`), or None."""
    return next((name for name in PUBLISHED if name.partition("/")[2] == Path(folder).name), None)
