"""Values that programs write into overrides and recipes."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from megarl.config.reading.override_text import as_yaml, override_text


@pytest.mark.parametrize(
    "value", ["\U0001f600 a", r"a \ud83d\ude00", "é\\", "x\U0001f600\U0001d465", [1, {"a": None}], True]
)
def test_yaml_reads_what_was_written(value: Any) -> None:
    assert yaml.safe_load(as_yaml({"value": value})) == {"value": value}
    assert override_text("a.b", value) == f"a.b={as_yaml(value)}"
