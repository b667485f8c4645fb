"""The weights for the engine and for model folders: the trainer's own, or with adapters merged in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megarl.models.lora import Adapter, adapters_of
from megarl.reshard.layouts.megatron import chunk_prefix
from megarl.training.offload import Offloadable


class MergedWeights:
    """Tensors for a plan, by Megatron's names in `weights`; their values are valid within `merged_lora`.

    A linear layer with an adapter has a separate tensor here. Its memory exists within `merged_lora` only; the frozen
    weight is never written. Merging needs no other rank: adapters are split like their weights.
    """

    def __init__(self, chunks: Sequence[nn.Module], parameters: Mapping[str, Tensor]) -> None:
        self._adapters: dict[str, tuple[Adapter, Tensor]] = {}
        for index, name, adapter in adapters_of(chunks):
            weight = (chunk_prefix(index, len(chunks)) + name).removesuffix("adapter") + "weight"
            self._adapters[weight] = adapter, parameters[weight]
        merged = {name: torch.empty_like(weight) for name, (_, weight) in self._adapters.items()}
        own = {name: value for name, value in parameters.items() if ".adapter." not in name}
        self.weights: dict[str, Tensor] = own | merged
        self._offloadable = Offloadable(merged.values, keeps_values=False)
        self._offloadable.offload()

    @contextmanager
    def merged_lora(self) -> Iterator[None]:
        """Compute the current merged weights within the context. The trainer's own must be on the device."""
        self._offloadable.onload()
        with torch.no_grad():
            for name, (adapter, weight) in self._adapters.items():
                adapter.merge_into(weight, self.weights[name])
        yield
        self._offloadable.offload()
