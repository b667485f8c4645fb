"""The room in which weights wait to be quantised: nobody's place is taken, and it is used again."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megarl.reshard.boxes import dense_piece
from megarl.reshard.plan import make_plan
from megarl.reshard.quantised import WeightBuffer, assign_buffer_starts


def test_places_are_shared_only_in_turn() -> None:
    chooser = random.Random(0)
    for _ in range(200):
        firsts = [chooser.randrange(12) for _ in range(chooser.randrange(1, 12))]
        spans = [(first, first + chooser.randrange(4), chooser.randrange(1, 50)) for first in firsts]
        places, total = assign_buffer_starts(spans)
        for i, (first, last, size) in enumerate(spans):
            assert places[i] + size <= total
            for j, (other_first, other_last, other_size) in enumerate(spans[:i]):
                # A bucket is unpacked while the next is copied.
                is_apart = other_last + 1 < first or last + 1 < other_first
                assert is_apart or places[j] + other_size <= places[i] or places[i] + size <= places[j]


def test_a_place_is_used_again() -> None:
    assert assign_buffer_starts([(0, 0, 7), (2, 3, 7), (5, 5, 7)]) == ([0, 0, 0], 7)
    assert assign_buffer_starts([(0, 0, 7), (1, 3, 7), (5, 5, 7)]) == ([0, 7, 0], 14)
    assert assign_buffer_starts([]) == ([], 0)


@dataclass(frozen=True)
class Module:
    """Names and shapes of a module's weights. Nothing is quantised here."""

    name: str
    shapes: dict[str, tuple[int, int]]


def test_the_room_has_memory_only_while_weights_arrive() -> None:
    modules: Any = [Module("first", {"a": (4, 6)}), Module("second", {"b": (2, 3)})]
    layout = tuple(dense_piece(name, module.shapes[name], name, 0) for module in modules for name in module.shapes)
    plan = make_plan([layout], [layout], itemsize=4, bucket_bytes=1 << 20)
    buffer = WeightBuffer(modules, plan, layout, dtype=torch.float32, device=torch.device("cpu"))
    storage = buffer.destinations["a"].untyped_storage()
    arrived: list[tuple[str, float]] = []

    def take(module: Any, weights: Mapping[str, torch.Tensor]) -> None:
        arrived.append((module.name, float(sum(weight.sum() for weight in weights.values()))))

    for turn in (1.0, 2.0):
        with buffer.allocate_buffer(take):
            assert storage.nbytes() == buffer.numel * 4 >= 30 * 4
            for weight in buffer.destinations.values():
                weight.fill_(turn)
            for bucket in range(len(plan.exchanged)):
                buffer.take_complete_modules(bucket)
        assert storage.nbytes() == 0
    assert arrived == [("first", 24.0), ("second", 6.0), ("first", 48.0), ("second", 12.0)]
