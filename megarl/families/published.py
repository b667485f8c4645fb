"""Fields of config.json of published models, so that a plan for them needs no download.

These are the models named by recipes in `launch/recipes/`. All other models are read from their folders.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Copied from the config.json files on the Hub: the fields read by `shape_from_config`.
_QWEN3 = {
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "initializer_range": 0.02,
}
_DENSE = _QWEN3 | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "num_key_value_heads": 8,
}
_EXPERTS = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-14B": _DENSE | {"intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40},
    "Qwen/Qwen3-32B": _DENSE | {"intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
    "Qwen/Qwen3-30B-A3B": _EXPERTS
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
    },
    "Qwen/Qwen3-235B-A22B": _EXPERTS
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
    },
}
"""Fields of config.json, by the name on the Hugging Face Hub."""


def published_name(folder: str | Path) -> str | None:
    """Return the Hub's name of a published model with the folder's last name (`models/Qwen3-14B`), or None."""
    return next((name for name in PUBLISHED if name.partition("/")[2] == Path(folder).name), None)
