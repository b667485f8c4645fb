"""Checkpoints of models with delta-nets or latent attention: megarl's conversion and Megatron agree on keys."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.checkpoint.convert import to_hf, to_megatron
from megarl.checkpoint.safetensors import head_rows
from megarl.checkpoint.stored import stored_tensors
from megarl.config.parallel import ParallelConfig
from megarl.families.shape import read_model_shape
from megarl.files.model_folder import SINGLE
from megarl.testing import RankPool
from tests.checkpoint.model_folders import assert_equal_bits, tensors_of, vision_folder
from tests.models.test_policy import build

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
    assert torch.equal(head_rows(tied, range(2, 7)), embedding[2:7])
    assert torch.equal(head_rows(untied, range(2, 7)), tensors_of(untied)["lm_head.weight"][2:7])


def test_a_vision_tower_is_kept_and_packed_experts_are_refused(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    """Released checkpoints have the text model's names under another prefix, and its sizes in `text_config`."""
    source = tiny_model(family="qwen3_5_moe_text", num_kv_heads=2, hidden_size=64, num_layers=4)
    config = json.loads((source / "config.json").read_text())
    whole = tmp_path / "whole"
    whole.mkdir()
    names = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
    (whole / "config.json").write_text(json.dumps({**names, "text_config": config}))
    tensors = {
        name.replace("model.", "model.language_model.", 1): value for name, value in load_file(source / SINGLE).items()
    }
    kept = {"model.visual.patch.weight": torch.randn(3, 5), "mtp.layers.0.mlp.experts.down_proj": torch.randn(2, 4, 4)}
    save_file(tensors | kept, whole / SINGLE)
    assert to_megatron(whole, tmp_path / "megatron", tp=2, ep=2).num_kept == 2
    assert to_hf(tmp_path / "megatron", tmp_path / "hf").num_kept == 2
    assert_equal_bits(tensors | kept, tensors_of(tmp_path / "hf"))

    packed = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    save_file(tensors | {packed: torch.randn(8, 128, 64)}, whole / SINGLE)
    assert [fault.kind for fault in stored_tensors(whole, read_model_shape(whole))[1]] == ["packed"]
