"""Tensors that are only copied: multi-token prediction layers and vision towers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megarl.checkpoint.kept import file_content, kept_tensors
from megarl.families.shape import read_model_shape
from megarl.files.model_folder import SINGLE
from megarl.types import DataError
from tests.checkpoint.model_folders import vision_folder

KEPT = {"model.visual.patch.weight": torch.arange(12.0).view(3, 4), "mtp.norm.weight": torch.arange(5).half()}


def test_a_file_cut_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """Reading at the end of a file returns no bytes, at once and forever."""
    folder = vision_folder(tmp_path / "model")
    save_file(KEPT, folder / SINGLE)
    found = kept_tensors(folder, read_model_shape(folder))
    assert found.keys() == KEPT.keys()
    with (folder / SINGLE).open("rb+") as file:
        file.truncate(max(kept.stop for kept in found.values()) - 3)
    with pytest.raises(DataError, match=r"model\.safetensors: became shorter"):
        list(file_content(found))
