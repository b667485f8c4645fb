"""Sliding attention windows of a model's layers, read from config.json. No torch.

A token attends to the last `sliding_window` tokens, itself included. vLLM 0.30 has windows in all layers of these
families or in none. Another arrangement is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megarl.families.config_json.config_values import COPY_AGAIN, flag, quote, size
from megarl.types import DataError

Windows = Callable[[Mapping[str, Any], int], tuple[int, ...]]
"""Function (config.json, number of layers) -> each layer's attention window in tokens; empty: no layer has a window.

Raises DataError if transformers and vLLM place windows in different layers.
"""

DEFAULTS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
"""Values of missing fields in transformers' classes of Qwen models."""


def read(config: Mapping[str, Any], windows: Windows) -> tuple[int, ...]:
    """Return each layer's window, as given by the family's `windows`. Raises DataError if `layer_types` differs."""
    num_layers = size(config, "num_hidden_layers")
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list) or any(
        kind not in ("full_attention", "sliding_attention") for kind in layer_types
    ):
        raise DataError(f"layer_types is {quote(layer_types)}; supported are full_attention and sliding_attention.")
    if layer_types and len(layer_types) != num_layers:
        raise DataError(f"layer_types has {len(layer_types)} entries for {num_layers} layers. {COPY_AGAIN}")
    layer_windows = windows(config, num_layers)
    if "sliding_attention" in layer_types and not layer_windows:
        raise DataError("layer_types: sliding_attention is not supported without use_sliding_window in this family.")
    if "full_attention" in layer_types and layer_windows:
        raise DataError("layer_types: this family has a window in every layer; remove full_attention.")
    return layer_windows


def none(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return no windows: every layer attends to all earlier tokens."""
    return ()


def in_all_layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return Mistral's windows: `sliding_window` in every layer; null means none."""
    return () if config["sliding_window"] is None else (size(config, "sliding_window"),) * num_layers


def switched_on(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return Qwen3-MoE's windows: `sliding_window` in every layer if `use_sliding_window` is true."""
    return in_all_layers(config, num_layers) if flag(config, "use_sliding_window") else ()


def from_a_layer_on(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the windows of dense Qwen2 and Qwen3 models: from `max_window_layers` on, or by `layer_types`.

    Raises DataError if only some layers have a window.
    """
    windows = switched_on(config, num_layers)
    if not windows:
        return ()
    layer_types = config.get("layer_types")
    first_layer = config["max_window_layers"]
    if layer_types:
        has_window = [kind == "sliding_attention" for kind in layer_types]
    else:
        has_window = [layer >= first_layer for layer in range(num_layers)]
    if not all(has_window):
        raise DataError(
            f"use_sliding_window: {sum(has_window)} of {num_layers} layers have a window; vLLM 0.30 needs it in all "
            "layers (max_window_layers 0) or in none (use_sliding_window false)."
        )
    return windows


def refuse_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Raise DataError if `use_sliding_window` is true. Otherwise return no windows.

    For families in which transformers and vLLM 0.30 give different layers a window.
    """
    if flag(config, "use_sliding_window"):
        raise DataError(
            "use_sliding_window: transformers and vLLM 0.30 give different layers of this family a window; set it to "
            "false."
        )
    return ()
