"""Mistral: Llama's tensors. Its attention has a sliding window unless `sliding_window` is null."""

from __future__ import annotations

from megarl.families import llama
from megarl.families.family import Family

FAMILY = Family(
    "MistralForCausalLM",
    llama.rules,
    is_quantisable=True,
    # 4096 is transformers' default for a missing field.
    has_windows=lambda config: bool(config.get("sliding_window", 4096)),
)
