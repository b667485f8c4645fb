"""Models of known shapes with random weights, made on the spot: a GPU machine may have neither network nor models."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import torch

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": dict(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, tie_word_embeddings=True
    ),
    "qwen3-1.7b": dict(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16, tie_word_embeddings=True
    ),
    "qwen3-4b": dict(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32, tie_word_embeddings=True
    ),
    "qwen3-8b": dict(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        tie_word_embeddings=False,
    ),
    "small": dict(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=8, tie_word_embeddings=True,
        vocab_size=997, num_key_value_heads=2, head_dim=32,
    ),
}  # fmt: skip
"""Fields of their config.json beside `_COMMON`."""
_COMMON: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8,
    "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "initializer_range": 0.02, "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip
_FILE_BYTES = 4 << 30


def config_of(name: str) -> dict[str, Any]:
    """The config.json of a shape."""
    return _COMMON | SHAPES[name]


def write_model(folder: Path, name: str, *, dtype: torch.dtype | None, seed: int = 0) -> None:
    """Write config.json, a tokenizer, and random weights of a type; no weights without a type.

    The tokenizer's few hundred tokens are the first of the model's vocabulary.
    """
    from tools.make_tiny_model import make_tokenizer

    tokenizer = make_tokenizer()
    config = config_of(name) | {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(folder)
    if dtype is not None:
        _write_weights(folder, dtype, seed)


def stop_tokens(vocab_size: int, mean_tokens: int) -> list[int]:
    """Return stop tokens that a random policy samples once in about `mean_tokens` tokens.

    Completions then end at all lengths. Without them, almost all would have the maximum length.
    """
    generator = torch.Generator().manual_seed(0)
    return torch.randperm(vocab_size, generator=generator)[: max(1, vocab_size // mean_tokens)].sort()[0].tolist()


def _write_weights(folder: Path, dtype: torch.dtype, seed: int) -> None:
    """Write random weights for the folder's config.json, in files of at most `_FILE_BYTES`."""
    from safetensors.torch import save_file

    from megarl.families.model_tensors import hf_tensors
    from megarl.families.shape import read_model_shape

    shape = read_model_shape(folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(seed)
    files: list[dict[str, tuple[int, ...]]] = [{}]
    for tensor, size in hf_tensors(shape).items():
        if dtype.itemsize * (sum(map(prod, files[-1].values())) + prod(size)) > _FILE_BYTES and files[-1]:
            files.append({})
        files[-1][tensor] = size
    file_of_tensor = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        weights = {}
        for tensor, size in names.items():
            weight = torch.ones(size, device=device, dtype=dtype)
            if "norm" not in tensor:
                weight.normal_(std=shape.initializer_range, generator=generator)
            weights[tensor] = weight.cpu()
            file_of_tensor[tensor] = file
        save_file(weights, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of_tensor}))
