"""Model folders of random weights, and what is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.families.model_tensors import hf_tensors
from megarl.families.shape import read_model_shape
from megarl.files.model_folder import CHECKSUMS, SINGLE

MTP = "num_nextn_predict_layers"
SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 8, "num_kv_heads": 4, "intermediate_size": 48}

MODELS = [
    pytest.param({"family": "qwen3", "tie_word_embeddings": True, "head_dim": 8, "vocab_size": 1031}, id="qwen3 tied"),
    pytest.param({"family": "qwen3", "tie_word_embeddings": False, "head_dim": 8}, id="qwen3 untied"),
    pytest.param({"family": "qwen2", "tie_word_embeddings": True}, id="qwen2 tied"),
    pytest.param({"family": "qwen2", "tie_word_embeddings": False, "vocab_size": 1031}, id="qwen2 untied"),
    pytest.param({"family": "llama", "tie_word_embeddings": True, "vocab_size": 1031}, id="llama tied"),
    pytest.param({"family": "llama", "tie_word_embeddings": False}, id="llama untied"),
]

MOE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 101, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
}  # fmt: skip


GLM = {
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "attention_bias": True, "use_qk_norm": True,
}  # fmt: skip


LATENT = {
    "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 10,
    "num_key_value_heads": 8, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip


def random_folder(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Path:
    """A model folder of random bits, in two files; texts end in what a rewrite would change.

    A layer for multi-token prediction is there too if config.json counts one.
    """
    folder.mkdir()
    (folder / "config.json").write_bytes(json.dumps({**config, "torch_dtype": "float32"}).encode() + b"\r\n")
    torch.manual_seed(3)
    shapes = hf_tensors(read_model_shape(folder))
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    for layer in range(config["num_hidden_layers"], config["num_hidden_layers"] + config.get(MTP, 0)):
        tensors[f"model.layers.{layer}.eh_proj.weight"] = torch.randn(32, 64).to(dtype)
        tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = torch.randn(4)
    files = {
        "model-b.safetensors": list(tensors)[::3],
        "model-a.safetensors": [*list(tensors)[1::3], *list(tensors)[2::3]],
    }
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    index = {"weight_map": {name: file for file, names in files.items() for name in names}, "metadata": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "tokenizer.json").write_bytes(b'{"a":   1}\r\n')
    (folder / "templates").mkdir()
    (folder / "templates" / "tool.jinja").write_bytes(b"\xff\x00")
    return folder


TEXT = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 1031, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}  # fmt: skip
VISION = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}


def vision_folder(folder: Path, tokenizer: Path | None = None, **fields: Any) -> Path:
    """A folder with the names of a checkpoint with a vision tower. `fields` are those of the whole model's config.json.

    The text section repeats `tie_word_embeddings`, since megarl refuses two values. The tokenizer is copied from the
    folder `tokenizer`.
    """
    folder.mkdir()
    ties = {name: value for name, value in fields.items() if name == "tie_word_embeddings"}
    (folder / "config.json").write_text(json.dumps({**VISION, "text_config": {**TEXT, **ties}, **fields}))
    for path in tokenizer.glob("token*.json") if tokenizer else ():
        (folder / path.name).write_bytes(path.read_bytes())
    torch.manual_seed(5)
    shapes = hf_tensors(read_model_shape(folder))
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, folder / SINGLE)
    return folder


def moe_folder(folder: Path, family: str = "Qwen3Moe", **changes: Any) -> Path:
    return random_folder(folder, {"architectures": [f"{family}ForCausalLM"], **MOE, **changes})


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def other_files(folder: Path) -> dict[str, bytes]:
    """Return a folder's files except weights and those that a conversion adds."""
    made = ("manifest.json", CHECKSUMS)
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.name not in made}


def assert_equal_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype and value.shape == other[name].shape, name
        assert value.contiguous().view(torch.uint8).equal(other[name].contiguous().view(torch.uint8)), name
