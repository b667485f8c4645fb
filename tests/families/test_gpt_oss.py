"""gpt-oss: what its page reads and refuses, and experts' tensors in packed ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.families.published import PUBLISHED
from megarl.families.shape import shape_from_config
from megarl.reshard.boxes import Box, Piece, contiguous_strides, dense_piece
from megarl.reshard.layouts.packed import checkpoint_tensors, unpack_layout
from megarl.types import DataError
from tests.shapes import small_shape

CONFIG = PUBLISHED["openai/gpt-oss-20b"]
ROPE = CONFIG["rope_scaling"]


def test_fields_that_transformers_5_writes() -> None:
    newer = {name: value for name, value in CONFIG.items() if name not in ("rope_scaling", "rope_theta")}
    newer |= {
        "rope_parameters": ROPE | {"rope_theta": 150000},
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "swiglu_alpha": 1.702,
        "quantization_config": None,
    }
    assert shape_from_config(newer) == shape_from_config(dict(CONFIG))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["full_attention"] * 24}, "layer_types is .* in vLLM 0.30 it is always"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06; in vLLM 0.30 it is always 1e-05"),
        ({"swiglu_limit": 8.0}, "swiglu_limit is 8.0; in vLLM 0.30 it is always 7.0"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True; in vLLM 0.30 it is always False"),
        ({"attention_bias": False}, "attention_bias is False; in vLLM 0.30 it is always True"),
        ({"rope_scaling": ROPE | {"attention_factor": 1.0}}, "only YaRN with the default attention factor"),
        ({"rope_scaling": None}, "vLLM 0.30 supports only YaRN"),
        ({"num_experts_per_tok": 33}, "num_experts_per_tok 33 is more than the 32 experts"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok 1 with normalised weights"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weights of quant_method 'fp8' cannot be trained"),
    ],
)
def test_values_that_engines_do_not_read_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        shape_from_config(CONFIG | fields)


def test_experts_in_packed_tensors() -> None:
    """Every element of a packed tensor belongs to one expert's tensor, at the index that transformers reads."""
    shape = small_shape("gpt_oss", num_layers=2)
    packed = {name: size for name, size in checkpoint_tensors(shape).items() if ".experts." in name}
    layer = "model.layers.1.mlp.experts."
    storages = {name: torch.arange(torch.Size(size).numel()) for name, size in packed.items()}
    pieces = unpack_layout((dense_piece(name, size, name, 0) for name, size in packed.items()), shape)
    assert sum(piece.box.numel for piece in pieces) == sum(value.numel() for value in storages.values())
    found = {piece.box.name: storages[piece.storage].as_strided(piece.box.shape, piece.strides, piece.offset)
             for piece in pieces}  # fmt: skip
    gate_up, down = (storages[layer + name].view(packed[layer + name]) for name in ("gate_up_proj", "down_proj"))
    assert torch.equal(found[layer + "5.gate_proj.weight"], gate_up[5, :, ::2].T)
    assert torch.equal(found[layer + "5.up_proj.weight"], gate_up[5, :, 1::2].T)
    assert torch.equal(found[layer + "5.down_proj.weight"], down[5].T)
    biases = storages[layer + "gate_up_proj_bias"].view(packed[layer + "gate_up_proj_bias"])
    assert torch.equal(found[layer + "5.up_proj.bias"], biases[5, 1::2])


def test_a_part_of_a_packed_tensor() -> None:
    """An odd edge falls between a gate's row and an up projection's."""
    shape = small_shape("gpt_oss", num_layers=1)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    whole = torch.arange(torch.Size(checkpoint_tensors(shape)[name]).numel()).view(checkpoint_tensors(shape)[name])
    box = Box(name, (2, 1, 3), (4, 5, 8))
    part = whole[2:4, 1:5, 3:8].contiguous()
    pieces = unpack_layout((Piece(box, "part", 0, contiguous_strides(box.shape)),), shape)
    assert sum(piece.box.numel for piece in pieces) == part.numel() and len(pieces) == 4
    for piece in pieces:
        expert, kind = piece.box.name.split(".")[-3:-1]
        own = whole[int(expert), :, kind == "up_proj" :: 2].T[tuple(map(slice, piece.box.start, piece.box.stop))]
        assert torch.equal(part.view(-1).as_strided(piece.box.shape, piece.strides, piece.offset), own)
