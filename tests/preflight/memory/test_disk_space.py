"""A run without room on its disk ends before anything starts, with numbers and the exit code of a full disk."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from megarl.cli import main
from megarl.config import Recipe
from megarl.files import atomic
from megarl.preflight import check_disk
from megarl.types import DiskFullError

SAVING = {"checkpoint": {"every_steps": 1}, "cluster": {"launcher": "local"}}


def _with_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(atomic, "_free_bytes", lambda _: num_bytes)


def _needed(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the bytes that a run must find, by its own message."""
    _with_free(monkeypatch, 17)
    with pytest.raises(DiskFullError) as caught:
        check_disk(recipe)
    match = re.search(r": (\d+) bytes needed, 17 free", str(caught.value))
    assert match is not None and str(recipe.runs_folder) in str(caught.value)
    return int(match[1])


def test_a_run_needs_room_for_its_largest_save(recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    never = _needed(recipe(cluster=SAVING["cluster"]), monkeypatch)
    saving = _needed(recipe(**SAVING), monkeypatch)
    # Weights, main weights and two moments of Adam in float32, against the exported model alone.
    assert atomic.LEAST_FREE_BYTES < never < saving
    _with_free(monkeypatch, saving)
    check_disk(recipe(**SAVING))
    # The disk of other machines may be another one.
    elsewhere = recipe(**SAVING | {"cluster": {"launcher": "slurm"}})
    assert _needed(elsewhere, monkeypatch) == atomic.LEAST_FREE_BYTES


def test_a_dry_run_ends_like_a_run_without_room(
    recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe().model_dump(mode="json", exclude_defaults=True)))
    _with_free(monkeypatch, 1 << 20)
    for further in (["--dry-run"], []):
        with pytest.raises(SystemExit) as caught:
            main(["train", str(file), *further])
        assert caught.value.code == 74
        assert "1048576 free" in capsys.readouterr().err
    assert not Path(recipe().runs_folder).exists() or not (Path(recipe().runs_folder) / "small").exists()
