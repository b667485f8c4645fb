"""MXFP4 weights against transformers' own dequantisation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.checkpoint.convert import to_hf, to_megatron
from megarl.checkpoint.mxfp4 import dequantise
from megarl.checkpoint.safetensors import FolderReader, load
from megarl.checkpoint.stored import find_stored_tensors
from megarl.config.parallel import ParallelConfig
from megarl.families.shape import padded_vocab_size, read_model_shape
from megarl.reshard.layouts.megatron import megatron_layouts, parameter_shapes
from megarl.types import DataError
from tools.make_tiny_model import make_tiny_model


def test_every_byte_and_scale_as_in_transformers() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    # Each of the 256 bytes in groups with each of the 255 scales; 255 stands for NaN in this format.
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(255, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8).view(255, 1).repeat(1, 16)
    ours = dequantise(blocks, scales)
    assert ours.shape == (255, 512) and ours.dtype == torch.bfloat16
    theirs = convert_moe_packed_tensors(blocks[None], scales[None])[0].T
    assert torch.equal(ours.view(torch.int16), theirs.contiguous().view(torch.int16))
    assert ours[127, :6].tolist() == [0.0, 0.0, 0.5, 0.0, 1.0, 0.0]


def test_a_group_whose_scale_is_nan_is_nan() -> None:
    """OCP microscaling 1.0, section 5.4.1: 255 is NaN in e8m0. A load then refuses the tensor by name."""
    blocks = torch.arange(32, dtype=torch.uint8).view(2, 16)
    values = dequantise(blocks, torch.tensor([127, 255], dtype=torch.uint8)).view(2, 32)
    assert values[0].isfinite().all() and values[1].isnan().all()


DOWN = "model.layers.0.mlp.experts.down_proj"


def quantise(folder: Path) -> None:
    """Replace the experts' weights in a folder by random MXFP4 blocks and scales."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, rows, columns = tensors.pop(name).shape
        blocks = (experts, columns, rows // 32, 16)
        tensors[name + "_blocks"] = torch.randint(256, blocks, generator=generator, dtype=torch.uint8)
        tensors[name + "_scales"] = torch.randint(118, 122, blocks[:-1], generator=generator, dtype=torch.uint8)
    save_file({name: value.bfloat16() if value.is_floating_point() else value for name, value in tensors.items()}, file)
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "mxfp4"}, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def quantised(tmp_path: Path) -> Path:
    folder = tmp_path / "quantised"
    make_tiny_model(folder, family="gpt_oss", hidden_size=64, num_layers=1, intermediate_size=96, num_experts=2)
    quantise(folder)
    return folder


def test_a_quantised_folder_becomes_a_plain_one(tmp_path: Path, quantised: Path) -> None:
    """Through a checkpoint split for two ranks, each in slabs; the result is transformers' own dequantisation."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    to_megatron(quantised, tmp_path / "megatron", tp=2, ep=2, verify=True)
    to_hf(tmp_path / "megatron", tmp_path / "hf", verify=True)
    before, after = load_file(quantised / "model.safetensors"), load_file(tmp_path / "hf" / "model.safetensors")
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())
    experts = "model.layers.0.mlp.experts."
    for name in (experts + "gate_up_proj", experts + "down_proj"):
        before[name] = convert_moe_packed_tensors(before.pop(name + "_blocks"), before.pop(name + "_scales"))
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_a_rank_loads_its_part_of_quantised_experts(quantised: Path) -> None:
    """The second of two expert-parallel ranks has the second expert: gates, then ups, from alternating columns."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = read_model_shape(quantised)
    parallel = ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=1, ep=2)
    layouts = megatron_layouts(model, parallel, padded_vocab_size=padded_vocab_size(model.vocab_size, 2))
    shapes = parameter_shapes(layouts, parallel.coordinates(1))
    parameters = {name: torch.zeros(shape) for name, shape in shapes.items()}
    load(quantised, layouts[1], parameters)
    stored = load_file(quantised / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    whole = convert_moe_packed_tensors(stored[name + "_blocks"], stored[name + "_scales"])[1].float()
    loaded = parameters["decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"]
    assert torch.equal(loaded, torch.cat([whole[:, ::2].T, whole[:, 1::2].T]))
    sinks = stored["model.layers.0.self_attn.sinks"].float()
    assert torch.equal(parameters["decoder.layers.0.self_attention.core_attention.softmax_offset"], sinks[2:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(DOWN + "_scales"), f"{DOWN}_blocks is here but {DOWN}_scales is missing: MXFP4"),
        (lambda tensors: tensors.update({DOWN: torch.zeros(2, 96, 64)}), f"{DOWN} is here, and again as MXFP4"),
        (lambda tensors: tensors.update({DOWN + "_scales": torch.zeros(2, 3)}), "_scales is F32 .* MXFP4 has U8 "),
    ],
)
def test_incomplete_quantised_tensors_are_refused(
    quantised: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    tensors = load_file(quantised / "model.safetensors")
    change(tensors)
    save_file(tensors, quantised / "model.safetensors")
    with pytest.raises(DataError, match=message):
        FolderReader(quantised, read_model_shape(quantised))


def test_a_quantised_part_in_two_files_is_refused(quantised: Path) -> None:
    tensors = load_file(quantised / "model.safetensors")
    (quantised / "model.safetensors").rename(quantised / "a.safetensors")
    save_file({DOWN + "_scales": tensors.pop(DOWN + "_scales") + 1, "lm_head.weight": tensors.pop("lm_head.weight")},
              quantised / "b.safetensors")  # fmt: skip
    index = dict.fromkeys(tensors, "a.safetensors") | {"lm_head.weight": "b.safetensors"}
    index |= {DOWN + "_scales": "b.safetensors"}
    (quantised / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    model = read_model_shape(quantised)
    faults = [fault for fault in find_stored_tensors(quantised, model)[1] if DOWN in fault.text]
    assert [fault.kind for fault in faults] == ["doubled"]
    assert f"{DOWN}_scales is also in {quantised}/a.safetensors" in faults[0].text
