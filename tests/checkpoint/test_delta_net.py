"""Checkpoints of models with delta-nets or latent attention: megarl's conversion and Megatron agree on keys."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.checkpoint.convert import to_hf, to_megatron
from megarl.checkpoint.safetensors import read_head_rows
from megarl.checkpoint.stored import find_stored_tensors
from megarl.config.parallel import ParallelConfig
from megarl.families.shape import read_model_shape
from megarl.files.model_folder import INDEX, SINGLE
from tests.checkpoint.model_folders import assert_equal_bits, tensors_of, vision_folder
from tests.models.test_policy import build
from tests.rank_pool import RankPool

NOT_IN_THIS_MODEL = r"(pre_mlp_layernorm\.weight|layer_norm_weight|_down_proj\._extra_state)$"
"""Keys of converted checkpoints that megarl's CPU model lacks: Transformer Engine's names of norms, extra states of
replicated projections."""


def read_and_save(source: str, checkpoint: str, saved: str) -> dict[str, list[str]]:
    """Read a converted checkpoint by Megatron into a tensor-parallel model, and save it by Megatron."""
    import os

    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    model = build(source, ParallelConfig(2, 1, 1, 1, etp=2))
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(77.0)
    metadata = {"singleton_local_shards": False}
    state = model.sharded_state_dict(metadata=metadata)
    loaded, missing, unexpected = dist_checkpointing.load({"model": state}, checkpoint, strict="return_all")
    model.load_state_dict(loaded["model"])
    if dist.get_rank() == 0:
        os.makedirs(saved)
    dist.barrier()
    dist_checkpointing.save({"model": model.sharded_state_dict(metadata=metadata)}, saved)
    return {"missing": sorted(missing), "unexpected": sorted(unexpected)}


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "deepseek_v3", "glm4_moe_lite"])
def test_megatron_reads_and_writes_the_same_weights(
    tmp_path: Path, ranks: RankPool, tiny_model: Callable[..., Path], family: str
) -> None:
    # GLM-4.7-Flash has no latent vector of queries here.
    own = {"query_rank": None} if family == "glm4_moe_lite" else {}
    source = tiny_model(family=family, num_kv_heads=2, hidden_size=64, num_layers=4, **own)
    to_megatron(source, tmp_path / "megatron", tp=1, pp=2)
    saved = tmp_path / "saved"
    results = ranks.run(read_and_save, str(source), str(tmp_path / "megatron" / "release"), str(saved), world_size=2)
    for result in results:
        assert result["unexpected"] == []
        assert [name for name in result["missing"] if not re.search(NOT_IN_THIS_MODEL, name)] == []
    to_hf(saved, tmp_path / "hf", hf=source)
    assert_equal_bits(tensors_of(source), tensors_of(tmp_path / "hf"))


def test_the_head_of_a_prefixed_checkpoint_is_read(tmp_path: Path) -> None:
    tied = vision_folder(tmp_path / "tied", tie_word_embeddings=True)
    untied = vision_folder(tmp_path / "untied", tie_word_embeddings=False)
    embedding = tensors_of(tied)["model.language_model.embed_tokens.weight"]
    assert torch.equal(read_head_rows(tied, range(2, 7)), embedding[2:7])
    assert torch.equal(read_head_rows(untied, range(2, 7)), tensors_of(untied)["lm_head.weight"][2:7])


def tiny(tiny_model: Callable[..., Path], family: str) -> Path:
    return tiny_model(family=family, num_kv_heads=2, hidden_size=64, num_layers=4)


def sharded(source: Path, folder: Path) -> Path:
    """Copy a folder whose weights are in one file to one with an index of two files."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = sorted(tensors)
    where = {name: f"model-0000{1 + (index % 3 == 0)}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("has_index", [False, True], ids=["one file", "index"])
def test_vision_towers_and_packed_experts_return_as_they_were(
    tmp_path: Path, tiny_model: Callable[..., Path], family: str, has_index: bool
) -> None:
    """Released checkpoints have the text model under another prefix, and packed experts in the larger models."""
    source = tiny(tiny_model, family)
    whole = sharded(source, tmp_path / "sharded") if has_index else source
    expected = tensors_of(whole)
    kept = [name for name in expected if name.startswith(("mtp.", "model.visual."))]
    packed = [name for name in expected if name.endswith(".experts.gate_up_proj")]
    assert len(kept) == 25 and len(packed) == (4 if family == "qwen3_5_moe" else 0)
    sizes = {"ep": 2} if packed else {}
    assert to_megatron(whole, tmp_path / "megatron", tp=2, **sizes, verify=True).num_kept == len(kept)
    assert to_hf(tmp_path / "megatron", tmp_path / "hf", verify=True).num_kept == len(kept)
    assert_equal_bits(expected, tensors_of(tmp_path / "hf"))


def test_the_form_of_experts_survives_without_weights(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    """A converted checkpoint records the form. A folder of weights given for the export has the form of its own."""
    source = tiny(tiny_model, "qwen3_5_moe")
    to_megatron(source, tmp_path / "megatron", dtype=torch.bfloat16)
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(source / "config.json", bare)
    apart = sharded(source, tmp_path / "apart")
    expert = "model.language_model.layers.0.mlp.experts.0.gate_proj.weight"
    (apart / INDEX).write_text(json.dumps({"weight_map": {expert: SINGLE}}))
    for file in apart.glob("*.safetensors"):
        file.unlink()
    save_file({expert: torch.zeros(1)}, apart / SINGLE)
    for hf, is_packed in ((None, True), (bare, True), (source, True), (apart, False)):
        out = tmp_path / f"out of {hf and hf.name}"
        to_hf(tmp_path / "megatron", out, hf=hf)
        assert read_model_shape(out).packs_experts is is_packed
        assert (expert in tensors_of(out)) is not is_packed


def test_packed_experts_of_another_family_are_refused_by_name(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    source = tiny(tiny_model, "qwen3_next")
    folder = tmp_path / "packed"
    shutil.copytree(source, folder)
    packed = "model.layers.0.mlp.experts.gate_up_proj"
    save_file(load_file(source / SINGLE) | {packed: torch.randn(8, 128, 64)}, folder / SINGLE)
    [fault] = find_stored_tensors(folder, read_model_shape(folder))[1]
    assert fault.kind == "packed" and packed in fault.text and "one tensor per expert" in fault.text


def test_packed_experts_of_another_size_are_refused(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    source = tiny(tiny_model, "qwen3_5_moe")
    folder = tmp_path / "transposed"
    shutil.copytree(source, folder)
    packed = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    tensors = load_file(source / SINGLE)
    save_file(tensors | {packed: tensors[packed].transpose(1, 2).contiguous()}, folder / SINGLE)
    [fault] = find_stored_tensors(folder, read_model_shape(folder))[1]
    assert fault.kind == "shape" and "is (8, 64, 128); config.json says (8, 128, 64)" in fault.text
