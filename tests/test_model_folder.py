from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megarl.model_folder import check_model_folder, read_safetensors_header, weight_files
from megarl.types import DataError

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A model folder of two shards with an index."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model(), folder)
    (folder / "model.safetensors").unlink()
    save_file({"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(5)}, folder / "one.safetensors")
    save_file({"c": torch.arange(7).to(torch.bfloat16)}, folder / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_whole_folders_have_no_problem(folder: Path, tiny_model: Callable[..., Path]) -> None:
    assert check_model_folder(folder) == []
    assert check_model_folder(tiny_model()) == []
    assert weight_files(folder) == {"one.safetensors": {"a", "b"}, "two.safetensors": {"c"}}


def test_header_tells_type_and_shape(folder: Path) -> None:
    assert read_safetensors_header(folder / "one.safetensors") == {"a": ("F32", (2, 3)), "b": ("I64", (5,))}


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def reindex(folder: Path, **changed: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= changed
    (folder / INDEX).write_text(json.dumps(index))


def corrupt_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[8] = ord("[")
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "file", "told"),
    [
        pytest.param(lambda f: cut(f / "two.safetensors", -1), "two.safetensors", "cut short", id="cut data"),
        pytest.param(lambda f: cut(f / "two.safetensors", 40), "two.safetensors", "cut short", id="cut header"),
        pytest.param(lambda f: cut(f / "two.safetensors", 3), "two.safetensors", "cut short", id="cut length"),
        pytest.param(lambda f: cut(f / "two.safetensors", 0), "two.safetensors", "cut short", id="empty shard"),
        pytest.param(lambda f: corrupt_header(f / "one.safetensors"), "one.safetensors", "invalid JSON", id="header"),
        pytest.param(lambda f: (f / "one.safetensors").unlink(), "one.safetensors", "not found", id="missing shard"),
        pytest.param(lambda f: reindex(f, d="two.safetensors"), "two.safetensors", "lacks d", id="missing tensor"),
        pytest.param(
            lambda f: reindex(f, d="../two.safetensors"), INDEX, "no file of this folder", id="path traversal"
        ),
        pytest.param(lambda f: cut(f / INDEX, 20), INDEX, "cannot be read", id="broken index"),
        pytest.param(lambda f: (f / INDEX).write_text("{}"), INDEX, "no weight_map", id="empty index"),
        pytest.param(lambda f: (f / INDEX).unlink(), "", "neither model.safetensors nor", id="no weights"),
        pytest.param(lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json", "not found", id="no tokenizer"),
        pytest.param(
            lambda f: cut(f / "tokenizer.json", 99), "tokenizer.json", "cannot be read", id="broken tokenizer"
        ),
        pytest.param(
            lambda f: cut(f / "tokenizer_config.json", 0), "tokenizer_config.json", "cannot", id="tokenizer config"
        ),
    ],
)
def test_each_damage_is_the_only_line_and_names_the_file(
    folder: Path, damage: Callable[[Path], object], file: str, told: str
) -> None:
    damage(folder)
    (problem,) = check_model_folder(folder)
    assert problem.startswith(f"{folder / file}: ")
    assert told in problem


def test_a_hub_name_is_answered_with_the_download_command(tmp_path: Path) -> None:
    (problem,) = check_model_folder(tmp_path / "org" / "name")
    assert "model folder not found" in problem and "hf download" in problem


def test_a_header_is_never_allocated_beyond_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little") + b"{}")
    with pytest.raises(DataError, match="cut short or no safetensors file"):
        read_safetensors_header(path)
