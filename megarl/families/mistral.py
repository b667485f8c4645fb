"""Mistral: Llama's tensors; its attention has a sliding window unless `sliding_window` is null."""

from __future__ import annotations

from megarl.families import llama
from megarl.families.family import Family

FAMILY = Family(
    "MistralForCausalLM",
    llama.rules,
    is_quantisable=True,
    has_windows=lambda config: bool(config.get("sliding_window", 4096)),
)
