"""Folders that are a model to evaluate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.families.model_tensors import hf_tensors
from megarl.families.shape import read_model_shape
from megarl.serving.local_model import _read_tensors, model_folder
from megarl.types import DataError


def test_a_run_has_the_model_that_it_exported(tmp_path: Path) -> None:
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


def test_an_engine_gets_no_tensors_of_a_vision_tower(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model(family="qwen3_5", hidden_size=64)
    names = {name for name, _ in _read_tensors(folder, ("mtp.", "model.visual."))}
    assert names == hf_tensors(read_model_shape(folder)).keys()
