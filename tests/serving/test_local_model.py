"""Folders and names that `megarl serve` accepts as a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.serving.local_model import model_folder
from megarl.types import DataError


def test_a_run_serves_the_model_that_it_exported(tmp_path: Path) -> None:
    exported = tmp_path / "hf"
    exported.mkdir()
    (tmp_path / "config.yaml").touch()
    (exported / "config.json").write_text("{}")
    (exported / "model.safetensors").touch()
    assert model_folder(tmp_path) == exported
    assert model_folder(exported) == exported


def test_a_folder_without_a_model_or_its_weights_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=str(tmp_path)):
        model_folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"model\.safetensors"):
        model_folder(tmp_path)
