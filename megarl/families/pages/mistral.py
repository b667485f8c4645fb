"""Mistral: Llama with a sliding attention window in every layer, unless `sliding_window` is null."""

from __future__ import annotations

from functools import partial

from megarl.families.config_json import windows
from megarl.families.family import DEFAULTS, Family
from megarl.families.pages import llama
from megarl.families.reading import read_dense

FAMILY = Family(
    "MistralForCausalLM",
    partial(read_dense, windows=windows.in_all_layers),
    llama.rules,
    {
        **DEFAULTS,
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    is_quantisable=True,
    has_adapter_slots=True,
)
