"""Comparison of the ranks' checksums of one version of the weights. The ranks' layouts may differ."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megarl.reshard.boxes import Box
from megarl.reshard.checks.fingerprint import MASK
from megarl.reshard.checks.ledger import RankChecksums

Checksums = Mapping[Box, int]
"""Checksum of each distinct box of one version."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Weights that differ from other copies of the same version. `holders` are the ranks with the wrong copy.

    Without a majority, `holders` are all ranks with a copy, and `is_certain` is False.
    """

    box: Box
    holders: tuple[str, ...]
    is_certain: bool


def merge_checksums(
    ranks: Sequence[RankChecksums], trusted: Checksums | None = None
) -> tuple[dict[Box, int], list[Difference]]:
    """Return the checksum of each box over all ranks, and a `Difference` for each box with unequal copies.

    A copy is wrong if it differs from `trusted`, or for a box outside `trusted`, from the majority.
    """
    copies_by_box: dict[Box, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for rank in ranks:
        for box, value in zip(rank.boxes, rank.values.tolist(), strict=True):
            copies_by_box[box][value].append(rank.holder)
    merged: dict[Box, int] = {}
    differences: list[Difference] = []
    for box, copies in copies_by_box.items():
        values_by_count = sorted(copies, key=lambda value: -len(copies[value]))
        accepted_value = (trusted or {}).get(box, values_by_count[0])
        merged[box] = accepted_value
        if list(copies) == [accepted_value]:
            continue
        is_certain = box in (trusted or {}) or len(copies[values_by_count[0]]) > len(copies[values_by_count[1]])
        wrong_holders = [
            holder
            for value, holders in copies.items()
            if not is_certain or value != accepted_value
            for holder in holders
        ]
        differences.append(Difference(box, tuple(wrong_holders), is_certain))
    return merged, differences


def sum_by_tensor(boxes: Checksums) -> dict[str, int]:
    """Return the checksum of each tensor by name: the sum over its disjoint boxes."""
    sums_by_name: dict[str, int] = defaultdict(int)
    for box, value in boxes.items():
        sums_by_name[box.name] = (sums_by_name[box.name] + value) & MASK
    return dict(sums_by_name)


def version_checksum(tensors: Mapping[str, int]) -> str:
    """Return the checksum of a whole model, 16 hexadecimal digits, from its tensors' checksums by name."""
    lines = "".join(f"{name} {value:016x}\n" for name, value in sorted(tensors.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def engine_differences(trainer: Checksums, engines: Sequence[RankChecksums]) -> Iterator[Difference]:
    """Yield the engines' weights that differ from the trainer's weights of the same version.

    Engines may lack tensors of the trainer. If trainer and engine split a tensor into different boxes, the sums over
    the tensor are compared.
    """
    comparable = [engine for engine in engines if not engine.is_converted]
    merged, differences = merge_checksums(comparable, trainer)
    yield from differences
    reported_names = {difference.box.name for difference in differences}
    expected, engine_checksums = sum_by_tensor(trainer), sum_by_tensor(merged)
    for name in engine_checksums:
        if name in reported_names or engine_checksums[name] == expected.get(name):
            continue
        boxes = [box for box in merged if box.name == name]
        holders = [engine.holder for engine in comparable if not set(boxes).isdisjoint(engine.boxes)]
        yield Difference(_hull(boxes), tuple(holders), len(holders) == 1)


def _hull(boxes: Sequence[Box]) -> Box:
    starts, stops = zip(*((box.start, box.stop) for box in boxes), strict=True)
    return Box(boxes[0].name, tuple(map(min, zip(*starts, strict=True))), tuple(map(max, zip(*stops, strict=True))))
