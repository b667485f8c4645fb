"""Device memory released while the engine samples, merged LoRA weights, and copies in page-locked host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megarl.models.lora import Adapter, adapters_of
from megarl.reshard.layouts.megatron import chunk_prefix
from megarl.reshard.reshard_report import MergeRounding
from megarl.training.host.host_arena import HostArena, HostCopy, aligned_bytes


class Offloadable:
    """A set of tensors whose device memory can be released and allocated again. Tensors and views stay valid.

    `tensors` lists them at each release: an optimizer has no state before its first step. `arena` holds their values in
    the meantime; without one, they come back as zeros.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], arena: HostArena | None = None) -> None:
        self._tensors, self._arena = tensors, arena
        self._released: list[tuple[torch.UntypedStorage, int]] = []
        self._copies: list[HostCopy] = []

    def offload(self) -> None:
        """Release the device memory of all tensors, after copying their values to the arena if there is one."""
        if self._released:
            return
        # Tensors may share a storage: move each storage once.
        storages = {storage._cdata: storage for storage in (t.untyped_storage() for t in self._tensors())}
        self._released = [(storage, storage.nbytes()) for storage in storages.values()]
        if self._arena is not None:
            self._copies = self._reuse_copies([size for _, size in self._released], self._arena)
            for (storage, _), copy in zip(self._released, self._copies, strict=False):
                self._arena.wait_for(copy)
                copy.memory.copy_(_bytes(storage), non_blocking=True)
        # The copies are asynchronous: their source must exist until they end.
        torch.cuda.synchronize()
        for storage, _ in self._released:
            storage.resize_(0)

    def onload(self) -> None:
        """Allocate the device memory again. Values come back from the arena; without one they are zero."""
        for index, (storage, size) in enumerate(self._released):
            storage.resize_(size)
            if self._arena is not None:
                _bytes(storage).copy_(self._copies[index].memory, non_blocking=True)
            else:
                _bytes(storage).zero_()
        self._released = []

    def _reuse_copies(self, sizes: Sequence[int], arena: HostArena) -> list[HostCopy]:
        """Return memory for copies of these sizes in bytes, then unused memory.

        Memory of earlier releases is used again, because page-locking is slow.
        """
        free_copies: dict[int, list[HostCopy]] = {}
        for copy in reversed(self._copies):
            free_copies.setdefault(copy.memory.nbytes, []).append(copy)
        reused_copies = [free_copies[size].pop() if free_copies.get(size) else None for size in sizes]
        new_copies = iter(
            arena.take_copies([size for size, copy in zip(sizes, reused_copies, strict=True) if copy is None])
        )
        unused_copies = [copy for copies in free_copies.values() for copy in copies]
        return [next(new_copies) if copy is None else copy for copy in reused_copies] + unused_copies


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class MergedWeights:
    """The model's weights with LoRA adapters merged into them, for the engine.

    `weights` maps Megatron's names to tensors, valid within the context `merging`. A merged weight is a separate tensor
    with memory within `merging` only; the frozen weight is never written. Merging needs no other rank, because adapters
    are split like their weights.
    """

    def __init__(self, chunks: Sequence[nn.Module], tensors: Mapping[str, Tensor]) -> None:
        """Allocate a merged weight for each weight with an adapter."""
        self._adapters: dict[str, tuple[Adapter, Tensor]] = {}
        for index, name, adapter in adapters_of(chunks):
            weight = (chunk_prefix(index, len(chunks)) + name).removesuffix("adapter") + "weight"
            self._adapters[weight] = adapter, tensors[weight]
        merged = {name: torch.empty_like(weight) for name, (_, weight) in self._adapters.items()}
        base_weights = {name: value for name, value in tensors.items() if ".adapter." not in name}
        self.weights: dict[str, Tensor] = base_weights | merged
        self._squared_norms: list[Tensor] = []
        self._offloadable = Offloadable(merged.values)
        self._offloadable.offload()

    @property
    def rounding(self) -> MergeRounding | None:
        """The rounding error of the newest merge on this rank; None: no adapters to count.

        Data-parallel copies of an adapter count once.
        """
        if not self._squared_norms:
            return None
        return MergeRounding(*torch.stack(self._squared_norms).sum(0).tolist())

    @contextmanager
    def merging(self) -> Iterator[None]:
        """Context in which `weights` has the adapters merged in.

        The trainer's own weights are on the device meanwhile.
        """
        self._offloadable.onload()
        self._squared_norms = []
        with torch.no_grad():
            for name, (adapter, weight) in self._adapters.items():
                unrounded = adapter.merge_into(weight, self.weights[name])
                # Count one of the data-parallel copies: all have the same error.
                if adapter.is_first_replica:
                    self._squared_norms.append(adapter.squared_norms(unrounded, self.weights[name]))
        yield
        self._offloadable.offload()


class ScaledAdapters:
    """The LoRA matrices as vLLM uses them: A [rank, in], and B [*out, rank] times the scale.

    `weights` maps Megatron's names to tensors, valid within the context `valid`. Outside it, the scaled copies of B
    have no memory.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        """Allocate a scaled copy of each B."""
        self._adapters: list[tuple[Adapter, Tensor]] = []
        self.weights: dict[str, Tensor] = {}
        for index, name, adapter in adapters_of(chunks):
            prefix = chunk_prefix(index, len(chunks)) + name
            scaled = torch.empty_like(adapter.b, requires_grad=False)
            self._adapters.append((adapter, scaled))
            self.weights |= {f"{prefix}.a": adapter.a.detach(), f"{prefix}.b": scaled}
        self._offloadable = Offloadable(lambda: (scaled for _, scaled in self._adapters))
        self._offloadable.offload()

    @contextmanager
    def valid(self) -> Iterator[None]:
        """Context in which the scaled matrices are valid. The trainer's own weights must be on the device."""
        self._offloadable.onload()
        with torch.no_grad():
            for adapter, scaled in self._adapters:
                # Multiply in float32, then round once. The usual scale is a power of two and rounds nothing.
                scaled.copy_(adapter.b.float() * adapter.scale)
        yield
        self._offloadable.offload()


BLOCK_BYTES = 1 << 30
"""Bytes of a block of page-locked host memory. torch rounds up to powers of two, and reuses blocks for the
next save.
"""


def copy_to_pinned_blocks(tensors: Sequence[Tensor], *, pin: bool, block_bytes: int = BLOCK_BYTES) -> list[Tensor]:
    """Return complete host copies [*shape] of the tensors, packed into page-locked blocks if `pin`.

    A tensor larger than a block gets its own.
    """
    copies: list[Tensor] = []
    block, offset = torch.empty(0, dtype=torch.uint8), 0
    for tensor in tensors:
        if offset + tensor.nbytes > block.nbytes:
            block = torch.empty(max(block_bytes, tensor.nbytes), dtype=torch.uint8, pin_memory=pin)
            offset = 0
        copy = block[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copy.copy_(tensor, non_blocking=pin)
        copies.append(copy)
        offset += aligned_bytes(tensor.nbytes)
    if pin:
        torch.cuda.synchronize()
    return copies
