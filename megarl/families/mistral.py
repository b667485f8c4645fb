"""Mistral: Llama with a sliding attention window in every layer, unless `sliding_window` is null."""

from __future__ import annotations

from megarl.families import llama, windows
from megarl.families.family import Family

FAMILY = Family("MistralForCausalLM", llama.rules, is_quantisable=True, windows=windows.in_all_layers)
