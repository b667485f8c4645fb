"""The generated references of recipe fields and metrics are up to date."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, PositiveFloat

from megarl.cli import main
from megarl.config.references.field_table import type_text
from megarl.config.schema import all_fields, section_of
from megarl.tracking.metric_table import rows

ROOT = Path(__file__).resolve().parents[2]
FIELDS, METRICS = ROOT / "launch/recipes/FIELDS.md", ROOT / "megarl/tracking/METRICS.md"


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        pytest.param(["show-config", "--markdown"], FIELDS, id="fields"),
        pytest.param(["metrics", "--markdown"], METRICS, id="metrics"),
        pytest.param(["schema"], ROOT / "launch/recipes/recipe.schema.json", id="schema"),
    ],
)
def test_a_reference_is_what_its_command_prints(
    arguments: list[str], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    command = f"megarl {' '.join(arguments)} > {path.relative_to(ROOT)}"
    assert capsys.readouterr().out == path.read_text(encoding="utf-8"), f"run: {command}"


def test_references_have_a_row_for_each_name() -> None:
    fields, metrics = FIELDS.read_text(encoding="utf-8"), METRICS.read_text(encoding="utf-8")
    values = [name for name, field in all_fields().items() if section_of(field) is None]
    assert len(values) > 200 and len(rows()) > 200
    assert [name for name in values if f"\n| `{name}` | " not in fields] == []
    assert [row.name for row in rows() if f"\n| `{row.name}` | " not in metrics] == []


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (int, "integer"),
        (PositiveFloat, "number > 0"),
        (Annotated[int, Field(ge=1, le=64)], "integer ≥ 1 ≤ 64"),
        (Literal["park", "abort"] | None, "`park`, `abort` or null"),
        (tuple[PositiveFloat, ...], "list of number > 0"),
        (tuple[float, float], "[number, number]"),
        (dict[str, str], "mapping to text"),
        (dict[str, Any], "mapping to any value"),
    ],
)
def test_types_are_words(kind: Any, text: str) -> None:
    assert type_text(kind) == text
