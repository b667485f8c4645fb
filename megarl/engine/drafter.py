"""A vLLM model together with its draft model for multi-token prediction (MTP), as one module for a reshard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from megarl.families.mtp import COPIED, DRAFTER


class ModelWithDrafter(nn.Module):
    """The parts of a vLLM model under their own names, and its draft model under `DRAFTER`.

    vLLM 0.30 shares embedding and head of the two, so they occur once among the parameters. `drafted` are the prefixes
    of the checkpoint's tensors that belong to the draft model.
    """

    def __init__(self, model: nn.Module, drafter: nn.Module, drafted: tuple[str, ...]) -> None:
        super().__init__()
        self._loaders: tuple[Any, Any] = (model, drafter)
        self._drafted = drafted
        for name, child in model.named_children():
            self.add_module(name, child)
        self.add_module(DRAFTER.rstrip("."), drafter)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load checkpoint tensors [any shape] of both models by vLLM's own loaders. Returns the names loaded."""
        given = list(weights)
        model, drafter = self._loaders
        drafts = [(name, tensor) for name, tensor in given if self._is_drafters(name)]
        return model.load_weights(given) | {DRAFTER + name for name in drafter.load_weights(drafts)}

    def passing_drafts(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield checkpoint tensors [any shape] for the policy's loader. After the last one, load the draft model's."""
        drafts = []
        for name, tensor in weights:
            if self._is_drafters(name):
                drafts.append((name, tensor))
            yield name, tensor
        with torch.no_grad():
            self._loaders[1].load_weights(drafts)

    def _is_drafters(self, name: str) -> bool:
        # A checkpoint's copies of embedding and head may be older than these, and would replace them.
        return name.startswith(self._drafted) and not name.endswith(tuple(COPIED))


def with_drafter(worker: Any, drafted: tuple[str, ...]) -> nn.Module:
    """Return a vLLM worker's model, with its draft model if it has one for MTP."""
    drafter = getattr(getattr(worker.model_runner, "drafter", None), "model", None)
    return worker.get_model() if drafter is None else ModelWithDrafter(worker.get_model(), drafter, drafted)
