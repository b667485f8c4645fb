"""Conversion of received weights to FP8 by vLLM's own quantiser: a module is quantised once its last weight has
arrived.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.groups.peer_errors import engine_collectives_marked
from megarl.reshard.boxes import Layout
from megarl.reshard.checks.ledger import Ledger
from megarl.reshard.layouts.vllm_quantised import QuantisedModule
from megarl.reshard.plan import Plan
from megarl.reshard.transport import BucketStage

TakeModule = Callable[[QuantisedModule, Mapping[str, Tensor]], None]
"""Function called with a module and its complete weights by name."""


class WeightBuffer:
    """Buffer for unquantised weights. It holds a module's weights from the arrival of the first piece (box of a tensor)
    until the last one.

    `destinations` maps names to weights: views of one buffer, with memory only within `allocate_buffer`. Modules use
    the same elements at different times. All ranks of an engine have the same buckets, so they quantise together.
    """

    def __init__(
        self,
        modules: Sequence[QuantisedModule],
        plan: Plan,
        layout: Layout,
        *,
        dtype: torch.dtype,
        device: torch.device,
        collective: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Assign parts of the buffer to `modules`. `layout` is the layout of this rank's engine.

        The context `collective` is entered around each quantisation, in which an engine's ranks exchange maxima.
        """
        self._collective = collective
        bucket_spans = find_bucket_spans({module.name: module.shapes for module in modules}, plan, layout)
        start_indices, self.numel = assign_buffer_starts(
            [(*bucket_spans[module.name], sum(map(prod, module.shapes.values()))) for module in modules]
        )
        self._buffer = torch.empty(self.numel, dtype=dtype, device=device)
        self.destinations: dict[str, Tensor] = {}
        self._modules_by_last_bucket: dict[int, list[QuantisedModule]] = defaultdict(list)
        for module, element_index in zip(modules, start_indices, strict=True):
            for name, shape in module.shapes.items():
                self.destinations[name] = self._buffer.narrow(0, element_index, prod(shape)).view(shape)
                element_index += prod(shape)
            self._modules_by_last_bucket[bucket_spans[module.name][1]].append(module)
        self._take: TakeModule | None = None

    @contextmanager
    def allocate_buffer(self, take: TakeModule | None = None) -> Iterator[None]:
        """Context in which the buffer has memory. `take` is called with each module once its last weight has
        arrived.
        """
        # Resizing the storage frees the memory and keeps all views valid, which the transport has bound.
        storage = self._buffer.untyped_storage()
        storage.resize_(self.numel * self._buffer.itemsize)
        self._take = take
        try:
            yield
        finally:
            self._take = None
            storage.resize_(0)

    def take_complete_modules(self, bucket: int) -> None:
        """Call `take` for each module completed by this bucket. All pieces of the bucket must have arrived."""
        assert self._take is not None
        for module in self._modules_by_last_bucket.get(bucket, ()):
            with self._collective():
                self._take(module, {name: self.destinations[name] for name in module.shapes})


class QuantisingConversion:
    """Conversion of the weights of one rank's `modules`, through a `WeightBuffer`.

    A rank without FP8 modules also takes part in the comparison, because other ranks need its weights.
    """

    def __init__(
        self,
        modules: Sequence[QuantisedModule],
        plan: Plan,
        layout: Layout,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        # The quantiser of vLLM 0.30 runs collectives over the engine's own ranks. Their failures are marked, so that a
        # failed engine is not taken for a lost peer of the reshard. Without `group` all ranks share one world: no mark
        # is needed.
        collective = partial(engine_collectives_marked, group)
        self._weight_buffer = WeightBuffer(modules, plan, layout, dtype=dtype, device=device, collective=collective)
        self.destinations: Mapping[str, Tensor] = self._weight_buffer.destinations
        self.converted: Collection[str] = {name for module in modules for name in module.live}
        self.stage = BucketStage("quantise", self._weight_buffer.take_complete_modules) if modules else None

    def allocate_buffers(self) -> AbstractContextManager[None]:
        return self._weight_buffer.allocate_buffer()

    def writing(self) -> AbstractContextManager[None]:
        return self._weight_buffer.allocate_buffer(QuantisedModule.write)

    def compare(self, ledger: Ledger, send: Callable[[], object]) -> tuple[dict[int, Tensor], list[str]]:
        """Compare directly copied parameters [*shape] by checksums; quantise the others from weights sent again."""
        # Compute these checksums before the second reshard below writes the parameters again.
        checksums = ledger.compute(name for name in ledger.storages if name not in self.destinations)
        differing: list[str] = []

        def compare_module(module: QuantisedModule, weights: Mapping[str, Tensor]) -> None:
            checksums.update(ledger.compute(weights))
            differing.extend(module.differing(weights))

        with self._weight_buffer.allocate_buffer(compare_module):
            send()
        return checksums, differing


def find_bucket_spans(modules: Mapping[str, Collection[str]], plan: Plan, layout: Layout) -> dict[str, tuple[int, int]]:
    """Return for each module its first and its last bucket with pieces for one rank, whose engine has this `layout`.

    `modules` maps module names to storage names. Raises ValueError for a module without pieces.
    """
    owners = {name: module for module, names in modules.items() for name in names}
    owners_by_tensor: dict[str, set[str]] = defaultdict(set)
    for piece in layout:
        if piece.storage in owners:
            owners_by_tensor[piece.box.name].add(owners[piece.storage])
    buckets_by_module: dict[str, list[int]] = defaultdict(list)
    for step in plan.steps:
        for owner in owners_by_tensor.get(step.tensor.name, ()):
            buckets_by_module[owner] += step.buckets
    if missing := [module for module in modules if module not in buckets_by_module]:
        raise ValueError(f"the reshard's plan has no tensor for module {missing[0]}")
    return {module: (min(buckets), max(buckets)) for module, buckets in buckets_by_module.items()}


def assign_buffer_starts(spans: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Return at which element of one shared buffer each module starts, and the buffer's number of elements.

    `spans` lists (first bucket, last bucket, size) of each module. Elements are free two buckets after their module's
    last bucket, because a bucket is unpacked while the next one is copied.
    """
    # (first element, end, last bucket) of each module in the buffer.
    occupied: list[tuple[int, int, int]] = []
    starts = [0] * len(spans)
    for module in sorted(range(len(spans)), key=lambda i: spans[i]):
        first_bucket, last_bucket, module_numel = spans[module]
        occupied = sorted(span for span in occupied if span[2] + 2 > first_bucket)
        first_free = 0
        for occupied_start, occupied_end, _ in occupied:
            if first_free + module_numel <= occupied_start:
                break
            first_free = max(first_free, occupied_end)
        starts[module] = first_free
        occupied.append((first_free, first_free + module_numel, last_bucket))
    return starts, max(
        (start + module_numel for start, (_, _, module_numel) in zip(starts, spans, strict=True)), default=0
    )
