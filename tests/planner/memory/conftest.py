"""Recipes of large models, of whose folders config.json is all that there is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.config.recipe import load

RECIPES = Path(__file__).resolve().parents[3] / "launch/recipes"
_QWEN3 = {
    "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "max_position_embeddings": 40960, "hidden_size": 5120,
}  # fmt: skip
_DENSE = _QWEN3 | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 8}
_EXPERTS = _QWEN3 | {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 4, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True,
}  # fmt: skip
_SMALL = _DENSE | {"tie_word_embeddings": True, "num_hidden_layers": 28, "num_attention_heads": 16}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _SMALL | {"hidden_size": 1024, "intermediate_size": 3072},
    "Qwen3-1.7B": _SMALL | {"hidden_size": 2048, "intermediate_size": 6144},
    "Qwen3-4B": _SMALL
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "Qwen3-8B": _DENSE
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "Qwen3-14B": _DENSE | {"intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40},
    "tiny": _DENSE
    | {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "vocab_size": 512,
    },
    "tiny_experts": _EXPERTS
    | {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
        "num_key_value_heads": 2, "vocab_size": 512, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
    "Qwen3-32B": _DENSE | {"intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
    "Qwen3-30B-A3B": _EXPERTS
    | {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
        "moe_intermediate_size": 768,
    },
    "Qwen3-235B-A22B": _EXPERTS
    | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94, "num_attention_heads": 64,
        "moe_intermediate_size": 1536,
    },
}  # fmt: skip
"""Fields of the published config.json."""


FOUR_WAY = {
    "trainer.tp": 4, "trainer.cp": 1, "trainer.max_tokens_per_microbatch": 40960, "rollout.kv_cache_gib": 102.5,
    "trainer.offload": ["optimizer", "gradients"],
}  # fmt: skip
"""Layout of 14B on 8 H200 whose bytes these tests know by hand, as overrides of qwen3_14b_dapo_h200."""
WIDE_MARGIN_GIB = {"qwen3_14b_dapo_h200": 20.0}
"""GiB that recipes leave of a GPU, where it is more than the planner's margin: for a first run on several GPUs."""
VARIANTS = {"qwen3_14b_four_way": ("qwen3_14b_dapo_h200", [f"{field}={value}" for field, value in FOUR_WAY.items()])}
"""Recipes of tests by name: a recipe of launch/recipes, and overrides."""


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    """`large("qwen3_14b_dapo", "trainer.tp=2", ...)` is that recipe of launch/recipes with overrides."""
    for name, fields in MODELS.items():
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(fields))
    monkeypatch.chdir(tmp_path)

    def read(name: str, *overrides: str) -> Recipe:
        base, given = VARIANTS.get(name, (name, []))
        return load(RECIPES / f"{base}.yaml", (*given, *overrides))

    return read
