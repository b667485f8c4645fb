"""Mistral: Llama's tensors, whose attention has a sliding window unless config.json says null."""

from __future__ import annotations

from megarl.families import llama
from megarl.families.family import Family

FAMILY = Family("MistralForCausalLM", llama.rules, has_windows=lambda config: bool(config.get("sliding_window", 4096)))
