"""Qwen3.5: experts in packed tensors, and the form that a folder's files have."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megarl.families.model_tensors import list_aliases, list_copied_prefixes
from megarl.families.published import PUBLISHED
from megarl.families.shape import ModelShape, read_model_shape, shape_from_config
from megarl.files.model_folder import INDEX, SINGLE
from megarl.reshard.boxes import Box, Piece, contiguous_strides, dense_piece
from megarl.reshard.layouts.packed import checkpoint_tensors, unpack_layout
from tests.shapes import small_shape

CONFIG = PUBLISHED["Qwen/Qwen3.5-35B-A3B"]
PREFIXES = {"qwen3_5_moe": "model.language_model.", "qwen3_5_moe_text": "model."}


def packed_shape(family: str = "qwen3_5_moe", **sizes: int) -> ModelShape:
    return dataclasses.replace(small_shape(family, **sizes), packs_experts=True)


@pytest.mark.parametrize("family", PREFIXES)
def test_experts_in_packed_tensors(family: str) -> None:
    """Every element of a packed tensor belongs to one expert's tensor, at the index that transformers reads."""
    shape = packed_shape(family, num_layers=2)
    packed = {name: size for name, size in checkpoint_tensors(shape).items() if ".experts." in name}
    layer = PREFIXES[family] + "layers.1.mlp.experts."
    assert packed.keys() >= {layer + "gate_up_proj", layer + "down_proj"} and len(packed) == 4
    storages = {name: torch.arange(torch.Size(size).numel()) for name, size in packed.items()}
    pieces = unpack_layout((dense_piece(name, size, name, 0) for name, size in packed.items()), shape)
    assert sum(piece.box.numel for piece in pieces) == sum(value.numel() for value in storages.values())
    found = {piece.box.name: storages[piece.storage].as_strided(piece.box.shape, piece.strides, piece.offset)
             for piece in pieces}  # fmt: skip
    gate_up, down = (storages[layer + name].view(packed[layer + name]) for name in ("gate_up_proj", "down_proj"))
    gate, up = gate_up[5].chunk(2)
    assert torch.equal(found[layer + "5.gate_proj.weight"], gate)
    assert torch.equal(found[layer + "5.up_proj.weight"], up)
    assert torch.equal(found[layer + "5.down_proj.weight"], down[5])


def test_a_part_of_a_packed_tensor() -> None:
    """The part's rows are the last gates and the first up projections."""
    shape = packed_shape(num_layers=1)
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    size = checkpoint_tensors(shape)[name]
    whole = torch.arange(torch.Size(size).numel()).view(size)
    rows = shape.moe_intermediate_size
    box = Box(name, (2, rows - 3, 1), (4, rows + 2, 6))
    part = whole[2:4, rows - 3 : rows + 2, 1:6].contiguous()
    pieces = unpack_layout((Piece(box, "part", 0, contiguous_strides(box.shape)),), shape)
    assert sum(piece.box.numel for piece in pieces) == part.numel() and len(pieces) == 4
    for piece in pieces:
        expert, kind = piece.box.name.split(".")[-3:-1]
        own = whole[int(expert)].chunk(2)[kind == "up_proj"][tuple(map(slice, piece.box.start, piece.box.stop))]
        assert torch.equal(part.view(-1).as_strided(piece.box.shape, piece.strides, piece.offset), own)


def test_names_begin_as_in_the_checkpoint() -> None:
    shape = dataclasses.replace(packed_shape(), num_kept_layers=1)
    assert {alias.packed for alias in list_aliases(shape)} == {
        "model.language_model.layers.{layer}.mlp.experts.gate_up_proj",
        "model.language_model.layers.{layer}.mlp.experts.down_proj",
    }
    assert all(alias.tensor.startswith("model.language_model.layers.{layer}.") for alias in list_aliases(shape))
    assert list_copied_prefixes(shape) == ("mtp.", "model.visual.")


def test_the_form_of_experts_is_that_of_the_files(tmp_path: Path) -> None:
    """The index decides, else the only file. Packed experts of a layer for multi-token prediction do not count."""
    packed = "model.language_model.layers.3.mlp.experts.gate_up_proj"
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert read_model_shape(tmp_path) == shape_from_config(dict(CONFIG))
    save_file({"mtp.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, 2, 2)}, tmp_path / SINGLE)
    assert not read_model_shape(tmp_path).packs_experts
    save_file({packed: torch.zeros(2, 2, 2)}, tmp_path / SINGLE)
    assert read_model_shape(tmp_path).packs_experts
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"model.language_model.norm.weight": SINGLE}}))
    assert not read_model_shape(tmp_path).packs_experts
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {packed: SINGLE}}))
    assert read_model_shape(tmp_path).packs_experts


def test_a_broken_file_is_left_to_the_reader_of_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / SINGLE).write_bytes(b"cut")
    assert not read_model_shape(tmp_path).packs_experts
