"""Where weights wait until all pieces of a module are there and can be quantised: a buffer that modules use in turn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod

import torch
from torch import Tensor

from megarl.reshard.boxes import Layout
from megarl.reshard.layouts.vllm_quantised import QuantisedModule
from megarl.reshard.plan import Plan

Take = Callable[[QuantisedModule, Mapping[str, Tensor]], None]
"""Done with a module's weights, by name, once they are complete."""


class WaitingRoom:
    """The weights that quantised modules load, from a bucket's first piece of a module to its last.

    `destinations` are these weights by name: views of one buffer, in which a module has a place from its first bucket
    to its last. It has memory within `opened` only. Which buckets those are follows from the plan, and so is the same
    on all ranks of an engine, which quantise together.
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
        """`layout` is this rank's; `collective` is entered where the ranks of an engine exchange maxima."""
        self._collective = collective
        spans = spans_of({module.name: module.shapes for module in modules}, plan, layout)
        places, self.numel = shared_places(
            [(*spans[module.name], sum(map(prod, module.shapes.values()))) for module in modules]
        )
        self._buffer = torch.empty(self.numel, dtype=dtype, device=device)
        self.destinations: dict[str, Tensor] = {}
        self._due: dict[int, list[QuantisedModule]] = defaultdict(list)
        for module, start in zip(modules, places, strict=True):
            for name, shape in module.shapes.items():
                self.destinations[name] = self._buffer.narrow(0, start, prod(shape)).view(shape)
                start += prod(shape)
            self._due[spans[module.name][1]].append(module)
        self._take: Take | None = None

    @contextmanager
    def opened(self, take: Take | None = None) -> Iterator[None]:
        """Within it there is memory for what arrives, and `take` has each module whose weights are complete."""
        storage = self._buffer.untyped_storage()
        storage.resize_(self.numel * self._buffer.itemsize)
        self._take = take
        try:
            yield
        finally:
            self._take = None
            storage.resize_(0)

    def arrived(self, bucket: int) -> None:
        """All pieces of a bucket are in place: take the modules of which it is the last."""
        assert self._take is not None
        for module in self._due.get(bucket, ()):
            with self._collective():
                self._take(module, {name: self.destinations[name] for name in module.shapes})


def spans_of(modules: Mapping[str, Collection[str]], plan: Plan, layout: Layout) -> dict[str, tuple[int, int]]:
    """The first and the last bucket of each module's pieces in a rank's layout; `modules` are names of storages.

    Raises ValueError for a module without any.
    """
    owners = {name: module for module, names in modules.items() for name in names}
    of_tensor: dict[str, set[str]] = defaultdict(set)
    for piece in layout:
        if piece.storage in owners:
            of_tensor[piece.box.name].add(owners[piece.storage])
    found: dict[str, list[int]] = defaultdict(list)
    for step in plan.steps:
        for owner in of_tensor.get(step.tensor.name, ()):
            found[owner] += step.buckets
    if missing := [module for module in modules if module not in found]:
        raise ValueError(f"no tensor of the plan reaches {missing[0]}")
    return {module: (min(buckets), max(buckets)) for module, buckets in found.items()}


def shared_places(spans: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Where each of `spans`, a first bucket, a last one and a size, begins in one buffer; and the buffer's size.

    First fit. A place is free again two buckets after its last: a bucket is unpacked while the next one is copied.
    """
    taken: list[tuple[int, int, int]] = []
    places = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda i: spans[i]):
        first, last, size = spans[index]
        taken = sorted(place for place in taken if place[2] + 2 > first)
        start = 0
        for begin, end, _ in taken:
            if start + size <= begin:
                break
            start = max(start, end)
        places[index] = start
        taken.append((start, start + size, last))
    return places, max((place + size for place, (_, _, size) in zip(places, spans, strict=True)), default=0)
