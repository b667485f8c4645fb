"""Loads full checkpoint tensors into vLLM's live model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from megarl.reshard.layouts.vllm import check_direct_write

_COPYING_MODELS = ("GptOssForCausalLM",)
"""Model classes of vLLM 0.30 whose loader writes some parameters directly, not through their `weight_loader`."""


def load(worker: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load pairs of a Hugging Face name and a full tensor [any shape] into the model of a vLLM worker.

    vLLM converts the tensors as at an engine's start. Raises DirectWriteError naming the layer if a model in
    `_COPYING_MODELS` needs a conversion.
    """
    model = worker.get_model()
    if type(model).__name__ not in _COPYING_MODELS:
        worker.reload_weights(weights_iterator=tensors)
        return
    # During a reload (vLLM 0.30), parameters are meta tensors until their `weight_loader` fills them. A direct copy
    # into a meta tensor is lost without an error: here all experts and sinks. Without conversions, the loader may write
    # the live parameters.
    check_direct_write(model)
    with torch.no_grad():
        model.load_weights(tensors)
