"""Identity of weights that no checkpoint has: training changes it, another form of the files does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megarl.checkpoint.weight_samples import weights_identity

KINDS = (
    "input_layernorm", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "post_attention_layernorm",
    "self_attn.k_proj.bias", "self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj.bias", "self_attn.q_proj",
    "self_attn.v_proj.bias", "self_attn.v_proj", *(f"mlp.experts.{expert}.gate_proj" for expert in range(12)),
)  # fmt: skip
"""Tensors of each layer."""


def weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    names = ["model.embed_tokens", "model.norm", *(f"model.layers.{n}.{kind}" for n in range(24) for kind in KINDS)]
    return {name: torch.randn(3, 20, generator=random).to(torch.bfloat16).to(dtype) for name in names}


def write(folder: Path, tensors: dict[str, Tensor], *, num_files: int = 1) -> Path:
    folder.mkdir()
    files = {name: f"model-{index % num_files}.safetensors" for index, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


@pytest.mark.parametrize("kind", ["self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "mlp.experts.5.gate_proj"])
def test_weights_with_one_kind_of_tensors_trained_are_others(tmp_path: Path, kind: str) -> None:
    """As adapters of one target, merged into the weights."""
    tensors = weights()
    before = weights_identity(write(tmp_path / "before", tensors))
    # An expert is trained with all the others.
    kinds = [one for one in KINDS if "experts" in one] if "experts" in kind else [kind]
    trained = {f"model.layers.{number}.{one}" for number in range(24) for one in kinds}
    after = {name: tensor + 0.5 if name in trained else tensor for name, tensor in tensors.items()}
    assert weights_identity(write(tmp_path / "after", after)) != before


def test_other_files_and_another_number_format_are_the_same_weights(tmp_path: Path) -> None:
    folders = (
        write(tmp_path / "one", weights()),
        write(tmp_path / "three", weights(), num_files=3),
        write(tmp_path / "half", weights(torch.bfloat16)),
    )
    assert len({*map(weights_identity, folders)}) == 1


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int8, torch.uint8, torch.int32])
def test_quantised_weights_have_an_identity(tmp_path: Path, dtype: torch.dtype) -> None:
    identities = [
        weights_identity(write(tmp_path / str(number), {"packed": torch.full((2, 3), number).to(dtype)}))
        for number in (1, 2)
    ]
    assert identities[0] != identities[1]
