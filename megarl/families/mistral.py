"""Mistral: Llama with a sliding attention window in every layer, unless `sliding_window` is null."""

from __future__ import annotations

from functools import partial

from megarl.families import llama, windows
from megarl.families.family import Family
from megarl.families.reading import read_dense

FAMILY = Family(
    "MistralForCausalLM",
    partial(read_dense, windows=windows.in_all_layers),
    llama.rules,
    is_quantisable=True,
    has_adapter_slots=True,
)
