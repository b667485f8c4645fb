"""Tensors that repeat others, or what config.json says: equal ones are ignored, others are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.checkpoint.stored import tensor_faults
from megarl.families.model_tensors import hf_tensors
from megarl.families.shape import read_model_shape
from megarl.files.model_folder import SINGLE
from tests.checkpoint.model_folders import LATENT, MOE, TEXT

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 33, "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FREQUENCIES = "model.layers.0.self_attn.rotary_emb.inv_freq"


def faults(folder: Path, *, with_draft_layers: bool = False, override: dict[str, Any] | None = None) -> list[str]:
    return list(tensor_faults(folder, read_model_shape(folder, override).with_draft_layers(with_draft_layers)))


def add(folder: Path, **tensors: torch.Tensor) -> None:
    save_file({**load_file(folder / SINGLE), **tensors}, folder / SINGLE, {"format": "pt"})


def one_file(folder: Path, config: dict[str, Any]) -> Path:
    """Write a random model in one file, with the layers for multi-token prediction that config.json counts."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shape = read_model_shape(folder)
    shapes = hf_tensors(shape.with_draft_layers(shape.draft_layers_problem is None))
    torch.manual_seed(3)
    save_file({name: torch.randn(size) for name, size in shapes.items()}, folder / SINGLE)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return one_file(tmp_path / "model", LLAMA)


def test_the_head_of_a_tied_embedding(folder: Path) -> None:
    embedding = load_file(folder / SINGLE)[EMBEDDING]
    add(folder, **{HEAD: embedding.clone()})
    assert faults(folder) == []
    changed = embedding.clone()
    changed[-1, -1] += 1e-3
    for other in (changed, embedding.double(), embedding[:-1].clone()):
        add(folder, **{HEAD: other})
        [fault] = faults(folder)
        assert f"{folder / SINGLE}: {HEAD} differs from {EMBEDDING}" in fault and "tie_word_embeddings true" in fault


def test_the_head_of_a_tied_text_model_with_a_vision_tower(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "tie_word_embeddings": True,
        "text_config": TEXT | {"tie_word_embeddings": True},
    }  # fmt: skip
    folder = one_file(tmp_path / "model", config)
    embedding = load_file(folder / SINGLE)["model.language_model.embed_tokens.weight"]
    add(folder, **{HEAD: embedding.clone()})
    assert faults(folder) == []
    add(folder, **{HEAD: embedding + 1})
    [fault] = faults(folder)
    assert "lm_head.weight differs from model.language_model.embed_tokens.weight" in fault


@pytest.mark.parametrize("rope", [{}, {"rope_scaling": YARN}, {"rope_scaling": LLAMA3}, {"rope_theta": 5e5}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotary_frequencies(folder: Path, rope: dict[str, Any], dtype: torch.dtype) -> None:
    """transformers and vLLM compute them from config.json, too."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    (folder / "config.json").write_text(json.dumps(LLAMA | rope))
    frequencies = LlamaRotaryEmbedding(LlamaConfig(**LLAMA | rope)).inv_freq.to(dtype)
    add(folder, **{FREQUENCIES: frequencies})
    # The folder's own settings count, not those of the run.
    assert faults(folder) == faults(folder, override={"rope_theta": 7.0}) == []
    add(folder, **{FREQUENCIES: frequencies * 1.05})
    [fault] = faults(folder)
    assert f"{FREQUENCIES} differs from the rotary frequencies that config.json gives (rope_theta" in fault
    add(folder, **{FREQUENCIES: frequencies[:-1].clone()})
    assert len(faults(folder)) == 1


def test_the_copies_in_a_layer_for_multi_token_prediction(tmp_path: Path) -> None:
    config = {**MOE, **LATENT, "architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 1}
    folder = one_file(tmp_path / "model", config)
    head = load_file(folder / SINGLE)[HEAD]
    copy = "model.layers.2.shared_head.head.weight"
    add(folder, **{copy: head.clone()})
    assert faults(folder, with_draft_layers=True) == []
    add(folder, **{copy: head + 1})
    [fault] = faults(folder, with_draft_layers=True)
    assert f"{copy} differs from {HEAD}, of which it is a copy" in fault
    # A layer that is not trained is copied as it is.
    assert faults(folder) == []
