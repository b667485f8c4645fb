"""Tensors that are only copied: multi-token prediction layers and vision towers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.checkpoint.convert import to_hf, to_megatron
from megarl.checkpoint.kept import file_content, list_unchanged_tensors
from megarl.families.shape import read_model_shape
from megarl.files.model_folder import INDEX, SINGLE
from megarl.types import DataError
from tests.checkpoint.model_folders import GLM, TEXT, assert_equal_bits, moe_folder, tensors_of, vision_folder

KEPT = {"model.visual.patch.weight": torch.arange(12.0).view(3, 4), "mtp.norm.weight": torch.arange(5).half()}


def test_a_file_cut_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """Reading at the end of a file returns no bytes, at once and forever."""
    folder = vision_folder(tmp_path / "model")
    save_file(KEPT, folder / SINGLE)
    found = list_unchanged_tensors(folder, read_model_shape(folder))
    assert found.keys() == KEPT.keys()
    with (folder / SINGLE).open("rb+") as file:
        file.truncate(max(kept.stop for kept in found.values()) - 3)
    with pytest.raises(DataError, match=r"model\.safetensors: became shorter"):
        list(file_content(found))


def test_kept_tensors_beyond_the_index_survive_a_conversion(tmp_path: Path) -> None:
    """Some folders have an index of the trained tensors alone, with the others in the same files."""
    source = moe_folder(tmp_path / "source", "Glm4Moe", **GLM)
    index = json.loads((source / INDEX).read_text())
    index["weight_map"] = {
        name: file for name, file in index["weight_map"].items() if not name.startswith("model.layers.2.")
    }
    (source / INDEX).write_text(json.dumps(index))
    to_megatron(source, tmp_path / "megatron")
    for hf in (None, source):
        out = tmp_path / ("own" if hf is None else "given")
        assert to_hf(tmp_path / "megatron", out, hf=hf).num_kept == 2
        assert_equal_bits(tensors_of(source), tensors_of(out))
        assert json.loads((out / INDEX).read_text())["weight_map"].keys() == tensors_of(source).keys()


def test_kept_tensors_stay_in_the_files_that_the_index_names(tmp_path: Path) -> None:
    """Files have float16 weights with float32 biases, trained and kept. One file has kept tensors alone."""
    source = moe_folder(tmp_path / "source", "Glm4Moe", **GLM)
    index = json.loads((source / INDEX).read_text())
    alone = "model.layers.2.eh_proj.weight"
    files = {file: load_file(source / file) for file in set(index["weight_map"].values())}
    files |= {"model-c.safetensors": {alone: files[index["weight_map"][alone]].pop(alone)}}
    for file, tensors in files.items():
        tensors |= {name: value.half() for name, value in tensors.items() if not name.endswith("correction_bias")}
        save_file(tensors, source / file)
    index["weight_map"][alone] = "model-c.safetensors"
    (source / INDEX).write_text(json.dumps(index))
    to_megatron(source, tmp_path / "megatron")
    for hf in (None, source):
        out = tmp_path / ("own" if hf is None else "given")
        assert to_hf(tmp_path / "megatron", out, hf=hf, verify=True).num_kept == 2
        assert (out / INDEX).read_bytes() == (source / INDEX).read_bytes()
        assert {path.name for path in out.glob("*.safetensors")} == files.keys()
        for file, tensors in files.items():
            assert_equal_bits(tensors, load_file(out / file))


def test_an_export_s_dtype_is_that_of_the_text_section_too(tmp_path: Path) -> None:
    text = TEXT | {"dtype": "float32"}
    source = vision_folder(tmp_path / "model", dtype="float32", text_config=text, vision_config={"dtype": "float32"})
    to_megatron(source, tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "hf", dtype=torch.bfloat16)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["dtype"], config["text_config"]["dtype"]) == ("bfloat16", "bfloat16")
    # Its tensors are copied byte for byte.
    assert config["vision_config"] == {"dtype": "float32"}
