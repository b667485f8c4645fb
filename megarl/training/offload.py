"""Device memory of tensors: released while the engine samples, merged weights, and copies in pinned host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megarl.models.lora import Adapter, adapters_of
from megarl.reshard.layouts.megatron import chunk_prefix


class Offloadable:
    """A set of tensors whose device memory can be released and reallocated; the tensors and their views stay valid.

    `tensors` lists them at each release: an optimizer has none before its first step. Without `keeps_values`, they come
    back as zeros and need no host memory.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, keeps_values: bool = True) -> None:
        self._tensors, self._keeps_values = tensors, keeps_values
        self._away: list[tuple[torch.UntypedStorage, int]] = []
        self._host: dict[int, Tensor] = {}

    def offload(self) -> None:
        """Move the contents to host memory and free the GPU memory."""
        if self._away:
            return
        # Several tensors may share one storage: each storage is moved once.
        storages = {storage._cdata: storage for storage in (t.untyped_storage() for t in self._tensors())}
        for key, storage in storages.items():
            if self._keeps_values:
                # Page-locked memory is slow to allocate, so the host copies are retained for the next release.
                if key not in self._host:
                    on_gpu = storage.device.type == "cuda"
                    self._host[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_gpu)
                self._host[key].copy_(_bytes(storage), non_blocking=True)
            self._away.append((storage, storage.nbytes()))
        # The copies are asynchronous: their source must not be freed before they end.
        torch.cuda.synchronize()
        for storage, _ in self._away:
            storage.resize_(0)

    def onload(self) -> None:
        """Allocate the GPU memory again and move the contents back."""
        for storage, size in self._away:
            storage.resize_(size)
            if self._keeps_values:
                _bytes(storage).copy_(self._host[storage._cdata], non_blocking=True)
            else:
                _bytes(storage).zero_()
        self._away = []


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """Return a byte view [bytes] of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class MergedWeights:
    """The model's weights with LoRA adapters merged into them. `weights` maps Megatron's names to tensors, valid within
    the context `merged_lora`.

    A linear layer with an adapter has a separate tensor for it. Its memory exists within `merged_lora` only; the frozen
    weight is never written. Merging needs no other rank: adapters are split like their weights.
    """

    def __init__(self, chunks: Sequence[nn.Module], tensors: Mapping[str, Tensor]) -> None:
        self._adapters: dict[str, tuple[Adapter, Tensor]] = {}
        for index, name, adapter in adapters_of(chunks):
            weight = (chunk_prefix(index, len(chunks)) + name).removesuffix("adapter") + "weight"
            self._adapters[weight] = adapter, tensors[weight]
        merged = {name: torch.empty_like(weight) for name, (_, weight) in self._adapters.items()}
        own = {name: value for name, value in tensors.items() if ".adapter." not in name}
        self.weights: dict[str, Tensor] = own | merged
        self._offloadable = Offloadable(merged.values, keeps_values=False)
        self._offloadable.offload()

    @contextmanager
    def merged_lora(self) -> Iterator[None]:
        """Context in which the merged weights are valid. The trainer's own weights must be on the device."""
        self._offloadable.onload()
        with torch.no_grad():
            for name, (adapter, weight) in self._adapters.items():
                adapter.merge_into(weight, self.weights[name])
        yield
        self._offloadable.offload()


class ScaledAdapters:
    """The LoRA matrices as vLLM computes with them: A [rank, in], and B [*out, rank] times alpha / rank.

    `weights` maps Megatron's names to tensors, valid within the context `scaled_lora`. The scaled copies of B exist
    within it only. Scaling needs no other rank.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._adapters: list[tuple[Adapter, Tensor]] = []
        self.weights: dict[str, Tensor] = {}
        for index, name, adapter in adapters_of(chunks):
            prefix = chunk_prefix(index, len(chunks)) + name
            scaled = torch.empty_like(adapter.b, requires_grad=False)
            self._adapters.append((adapter, scaled))
            self.weights |= {f"{prefix}.a": adapter.a.detach(), f"{prefix}.b": scaled}
        self._offloadable = Offloadable(lambda: (scaled for _, scaled in self._adapters), keeps_values=False)
        self._offloadable.offload()

    @contextmanager
    def scaled_lora(self) -> Iterator[None]:
        """Context in which the scaled matrices are valid. The trainer's own weights must be on the device."""
        self._offloadable.onload()
        with torch.no_grad():
            for adapter, scaled in self._adapters:
                # In float32, then rounded once. The usual alpha / rank is a power of two and rounds nothing.
                scaled.copy_(adapter.b.float() * adapter.scale)
        yield
        self._offloadable.offload()


BLOCK_BYTES = 1 << 30
"""Bytes of a block of pinned host memory. torch rounds up to powers of two and reuses blocks for the next save."""
# Copies start at multiples of a cache line, so any dtype can view them.
_ALIGNMENT = 64


def copy_to_pinned_blocks(tensors: Sequence[Tensor], *, pin: bool, block_bytes: int = BLOCK_BYTES) -> list[Tensor]:
    """Return contiguous, complete host copies [*shape] of the tensors, packed into page-locked blocks if `pin`.

    A tensor larger than a block gets its own.
    """
    copies: list[Tensor] = []
    block, taken = torch.empty(0, dtype=torch.uint8), 0
    for tensor in tensors:
        if taken + tensor.nbytes > block.nbytes:
            block = torch.empty(max(block_bytes, tensor.nbytes), dtype=torch.uint8, pin_memory=pin)
            taken = 0
        copy = block[taken : taken + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copy.copy_(tensor, non_blocking=pin)
        copies.append(copy)
        taken += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    if pin:
        torch.cuda.synchronize()
    return copies
