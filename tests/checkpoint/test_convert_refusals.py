"""Conversion refuses damaged files, crafted pickles and settings that do not fit, and names them."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.checkpoint.convert import to_hf, to_megatron, verify_copy
from megarl.checkpoint.safetensors import FolderReader
from megarl.families.shape import read_model_shape
from megarl.types import ConfigError, DataError
from tests.checkpoint.model_folders import SIZES, assert_equal_bits, moe_folder, tensors_of


def _to_megatron(folder: Path) -> None:
    to_megatron(folder / "source", folder / "new", tp=2)


def _to_hf(folder: Path) -> None:
    to_hf(folder / "megatron", folder / "new")


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 40)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _edit_index(path: Path, name: str, file: str | None) -> None:
    index = json.loads(path.read_text())
    index["weight_map"] |= {name: file} if file else {}
    path.write_text(json.dumps(index))


def _drop_tensor(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"].pop("model.norm.weight")
    save_file({name: value for name, value in load_file(file).items() if name != "model.norm.weight"}, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _pickle_only(folder: Path) -> None:
    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink()
    torch.save({}, folder / "pytorch_model.bin")


@dataclass
class Evil:
    folder: str

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.folder,)


def _edit_metadata(folder: Path, edit: Callable[[Any], Any]) -> None:
    """Change `.metadata` as somebody would who also knows the manifest."""
    (folder / "manifest.json").unlink()
    path = folder / "release" / ".metadata"
    path.write_bytes(pickle.dumps(edit(pickle.loads(path.read_bytes()))))


def _file_elsewhere(metadata: Any) -> Any:
    next(iter(metadata.storage_data.values())).relative_path = "../__0_0.distcp"
    return metadata


def _lose_key(metadata: Any) -> Any:
    del metadata.state_dict_metadata["decoder.final_layernorm.weight"]
    return metadata


def _lose_chunk(metadata: Any) -> Any:
    metadata.state_dict_metadata["decoder.layers.mlp.experts.experts.linear_fc2.weight"].chunks.pop()
    return metadata


INDEX = "model.safetensors.index.json"

DAMAGES = [
    pytest.param(lambda f: _edit_index(f / "source" / INDEX, "x", "../a.safetensors"), _to_megatron,
                 "index.json: the index places the tensor x in '../a.safetensors'", id="index points outside"),
    pytest.param(lambda f: _pickle_only(f / "source"), _to_megatron,
                 "pytorch_model.bin: neither .* megarl reads weights from safetensors only", id="pickled weights"),
    pytest.param(lambda f: _edit_index(f / "source" / INDEX, "x", "pytorch_model.bin"), _to_megatron,
                 "pytorch_model.bin: not found", id="index names a pickle"),
    pytest.param(lambda f: _cut(f / "source" / "model-a.safetensors"), _to_megatron,
                 "model-a.safetensors: cut short", id="file cut short"),
    pytest.param(lambda f: _drop_tensor(f / "source"), _to_megatron,
                 "source: tensor model.norm.weight is missing", id="tensor missing"),
    pytest.param(lambda f: (f / "source" / "model-a.safetensors").unlink(), _to_megatron,
                 "model-a.safetensors: not found", id="file missing"),
    pytest.param(lambda f: _cut(f / "megatron" / "release" / "__1_0.distcp"), _to_hf,
                 "__1_0.distcp: .* bytes where manifest.json says", id="chunk file cut short"),
    pytest.param(lambda f: [(f / "megatron" / "manifest.json").unlink(),
                            _cut(f / "megatron" / "release" / "__1_0.distcp")], _to_hf,
                 "__1_0.distcp: .* bytes, cut short", id="chunk file cut short, no manifest"),
    pytest.param(lambda f: (f / "megatron" / "release" / "__0_0.distcp").unlink(), _to_hf, "__0_0.distcp: not found",
                 id="chunk file missing"),
    pytest.param(lambda f: _flip(f / "megatron" / "release" / "__0_0.distcp"), _to_hf, "__0_0.distcp: ",
                 id="a bit flipped"),
    pytest.param(lambda f: _flip(f / "megatron" / "hf" / "tokenizer.json"), _to_hf, "tokenizer.json: its sha256 is",
                 id="a bit of the tokenizer flipped"),
    pytest.param(lambda f: _edit_metadata(f / "megatron", lambda m: [m, Evil(str(f / "evil"))]), _to_hf,
                 r"\.metadata: cannot be read \(UnpicklingError: .* the class posix.mkdir", id="metadata runs code"),
    pytest.param(lambda f: _edit_metadata(f / "megatron", lambda m: [m]), _to_hf, r"\.metadata: cannot be read",
                 id="metadata of another kind"),
    pytest.param(lambda f: _edit_metadata(f / "megatron", _file_elsewhere), _to_hf,
                 r"\.metadata: .* is stored in '\.\./__0_0.distcp'", id="metadata points outside"),
    pytest.param(lambda f: _edit_metadata(f / "megatron", _lose_key), _to_hf,
                 r"\.metadata: .* not contain the tensor decoder.final_layernorm.weight", id="parameter missing"),
    pytest.param(lambda f: _edit_metadata(f / "megatron", _lose_chunk), _to_hf,
                 r"\.metadata: the checkpoint does not hold all of model.layers.1.mlp", id="chunk missing"),
    pytest.param(lambda f: (f / "megatron" / "latest_checkpointed_iteration.txt").write_text("../x") and
                 (f / "megatron" / "manifest.json").unlink(), _to_hf, "contains '../x' instead", id="tracker"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "run", "message"), DAMAGES)
def test_damage_is_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], Any], run: Callable[[Path], None], message: str
) -> None:
    to_megatron(moe_folder(tmp_path / "source"), tmp_path / "megatron", tp=2)
    damage(tmp_path)
    with pytest.raises(DataError, match=message):
        run(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "megatron"}


def test_a_flipped_bit_of_weights_fails_the_hash_or_the_checksum_of_its_chunk(tmp_path: Path) -> None:
    to_megatron(moe_folder(tmp_path / "source"), tmp_path / "megatron")
    _flip(tmp_path / "megatron" / "release" / "common.pt")
    with pytest.raises(DataError, match=r"common.pt: its sha256 is"):
        _to_hf(tmp_path)


def test_legacy_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "megatron" / "iter_0000007" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "megatron" / "hf").mkdir()
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("7\n")
    torch.save({}, tmp_path / "megatron" / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt")
    source = moe_folder(tmp_path / "source")
    with pytest.raises(DataError, match=r"mp_rank_00/model_optim_rng.pt: not a torch_dist checkpoint"):
        to_hf(tmp_path / "megatron", tmp_path / "new", hf=source)


def test_settings_that_do_not_fit_are_refused(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    dense = tiny_model(**SIZES)
    for sizes, message in (
        ({"tp": 3}, "tp 3 does not divide"),
        ({"pp": 4}, "pp 4 exceeds the model's 2 layers"),
        ({"ep": 2}, "--ep 2 --etp 1: the model has no experts"),
        ({"tp": 0}, "--tp 0 must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            to_megatron(dense, tmp_path / "new", **sizes)
    with pytest.raises(ConfigError, match="ep 3 does not divide the model's 4 experts"):
        to_megatron(moe_folder(tmp_path / "moe"), tmp_path / "new", ep=3)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").touch()
    with pytest.raises(ConfigError, match="full: exists already"):
        to_megatron(dense, tmp_path / "full")
    to_megatron(dense, tmp_path / "megatron")
    with pytest.raises(ConfigError, match="megatron: has no folder hf"):
        (tmp_path / "megatron" / "hf").rename(tmp_path / "hf")
        (tmp_path / "megatron" / "manifest.json").unlink()
        to_hf(tmp_path / "megatron", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_mixed_types_are_kept_or_refused(tmp_path: Path) -> None:
    source = moe_folder(tmp_path / "source")
    file = source / "model-b.safetensors"
    tensors = load_file(file)
    save_file({n: v.bfloat16() if n == "model.embed_tokens.weight" else v for n, v in tensors.items()}, file)
    to_megatron(source, tmp_path / "megatron", tp=2, verify=True)
    to_hf(tmp_path / "megatron", tmp_path / "hf", verify=True)
    assert_equal_bits(tensors_of(source), tensors_of(tmp_path / "hf"))
    first_query = "model.layers.0.self_attn.q_proj.weight"
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        save_file({n: v.bfloat16() if n == first_query else v for n, v in tensors.items()}, path)
    with pytest.raises(
        DataError, match=r"torch.float32, but other parts of .*linear_qkv.weight have torch.bfloat16; give"
    ):
        to_megatron(source, tmp_path / "other")
    to_megatron(source, tmp_path / "other", dtype=torch.float32, verify=True)


def test_verification_names_the_tensor(tmp_path: Path) -> None:
    source = moe_folder(tmp_path / "source")
    model = read_model_shape(source)
    changed = moe_folder(tmp_path / "changed")
    verify_copy(FolderReader(source, model), FolderReader(changed, model), model, changed)
    tensors = load_file(changed / "model-a.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    file = next(path for path in changed.glob("*.safetensors") if name in load_file(path))
    tensors = load_file(file)
    tensors[name].view(torch.int32)[-1, -1] ^= 1
    save_file(tensors, file)
    with pytest.raises(DataError, match=f"changed: {name} differs from its source"):
        verify_copy(FolderReader(source, model), FolderReader(changed, model), model, changed)


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    model = moe_folder(tmp_path / "model")
    with pytest.raises(ConfigError, match=f"{tmp_path}/missing: not found; name the folder of a checkpoint"):
        to_hf(tmp_path / "missing", tmp_path / "out")
    with pytest.raises(ConfigError, match=f"{model}: is a Hugging Face model folder.* to-megatron"):
        to_hf(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_conversion_restores_the_number_of_threads(tmp_path: Path) -> None:
    """It computes with one thread per operation: more would wait busily."""
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        to_megatron(moe_folder(tmp_path / "model"), tmp_path / "megatron")
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
