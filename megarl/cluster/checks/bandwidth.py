"""Bandwidth test of the links between ranks. Disjoint pairs of ranks exchange data at the same time.

In rings of three or more, each rank is in two pairs. So a slow rank can be distinguished from its partners.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

from megarl.findings import Finding
from megarl.groups import world
from megarl.platform import device

WITHIN, ACROSS = "within nodes", "across nodes"
"""Kinds of links."""

_TRIALS = 5
"""Repetitions of each exchange. The fastest counts: interference only slows an exchange."""
_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
"""Bytes per exchange, by type of device."""


class Bandwidth:
    """Worker class of a rank in a bandwidth test.

    A rank's partners are its neighbours on the node, and the ranks with its local rank on neighbouring nodes.
    """

    def __init__(self, rank: int, world_size: int, topology: Sequence[Sequence[str]], timeout_seconds: float) -> None:
        world.initialize(timeout_seconds)
        self._rank, self._rounds = rank, make_exchange_rounds([node_and_switches[0] for node_and_switches in topology])
        size = _BYTES[device.current().type]
        self._sent_buffer, self._received_buffer = torch.zeros(2, size, dtype=torch.uint8, device=device.current())

    def measure(self) -> dict[str, float]:
        """Return this rank's bandwidths in bytes per second, by kind of link.

        `WITHIN` and `ACROSS` have the best partner's value. `all-reduce` is a collective of all ranks.
        """
        bandwidths: dict[str, float] = {}
        world_size, buffer_bytes = dist.get_world_size(), self._sent_buffer.nbytes
        # The collective runs first: a backend with connections on first use then connects all ranks at once.
        seconds = min(self._measure_seconds(partial(dist.all_reduce, self._sent_buffer)) for _ in range(_TRIALS))
        # Bus bandwidth, as in nccl-tests: in a ring, each rank sends 2 (n - 1) / n times the buffer.
        bandwidths["all-reduce"] = 2 * (world_size - 1) / world_size * buffer_bytes / seconds
        for link_kind, partners in self._rounds:
            exchange = partial(self._exchange, partners.get(self._rank))
            seconds = min(self._measure_seconds(exchange) for _ in range(_TRIALS))
            if self._rank in partners:
                # Factor 2: a pair sends in both directions at the same time.
                bandwidths[link_kind] = max(bandwidths.get(link_kind, 0.0), 2 * buffer_bytes / seconds)
        self._sent_buffer = self._received_buffer = torch.zeros(1)
        # An engine started later sizes its KV cache by the free memory.
        torch.cuda.empty_cache()
        return bandwidths

    def close(self) -> None:
        world.leave()

    def _exchange(self, partner: int | None) -> None:
        if partner is None:
            return
        operations = [
            dist.P2POp(dist.isend, self._sent_buffer, partner),
            dist.P2POp(dist.irecv, self._received_buffer, partner),
        ]
        for operation in dist.batch_isend_irecv(operations):
            operation.wait()

    def _measure_seconds(self, exchange: Callable[[], object]) -> float:
        """Return the seconds of an exchange that all ranks start together."""
        dist.barrier()
        # An accelerator works asynchronously; `item` waits for it before the clock is read.
        self._received_buffer[-1].item()
        began = time.perf_counter()
        exchange()
        self._sent_buffer[-1].item()
        self._received_buffer[-1].item()
        return time.perf_counter() - began


def make_exchange_rounds(nodes: Sequence[str]) -> list[tuple[str, dict[int, int]]]:
    """Return the rounds of a bandwidth test: the kind of link, and each participating rank's partner.

    All pairs of a round exchange data at the same time. `nodes[r]` is the node of rank r. Pairs `WITHIN` nodes are
    neighbours on a node. Pairs `ACROSS` nodes have the same local rank on neighbouring nodes.
    """
    ranks_by_node = [[r for r, node in enumerate(nodes) if node == name] for name in dict.fromkeys(nodes)]
    rounds_within, rounds_across = [], []
    for pairs in _make_ring_rounds(max(map(len, ranks_by_node))):
        rounds_within.append(
            [(ranks[first], ranks[second]) for ranks in ranks_by_node for first, second in pairs if second < len(ranks)]
        )
    for pairs in _make_ring_rounds(len(ranks_by_node)):
        rounds_across.append(
            [pair for first, second in pairs for pair in zip(ranks_by_node[first], ranks_by_node[second], strict=False)]
        )
    return [
        (link_kind, {rank: partner for first, second in pairs for rank, partner in ((first, second), (second, first))})
        for link_kind, rounds in ((WITHIN, rounds_within), (ACROSS, rounds_across))
        for pairs in rounds
        if pairs
    ]


def _make_ring_rounds(size: int) -> list[list[tuple[int, int]]]:
    """Return the neighbours in a ring of `size` members as rounds of disjoint pairs."""
    line_rounds = [[(i, i + 1) for i in range(first_member, size - 1, 2)] for first_member in (0, 1)]
    # A ring of two has only one pair, so the pair closing the ring would repeat it.
    return [pairs for pairs in (*line_rounds, [(0, size - 1)] if size > 2 else []) if pairs]


def find_slow_links(
    topology: Sequence[Sequence[str]], bandwidths: Sequence[Mapping[str, float]], least_share: float
) -> Iterator[Finding]:
    """Yield a fault for each rank with less than `least_share` of the median bandwidth, per kind of link."""
    for link_kind in (WITHIN, ACROSS):
        if not (kind_speeds := [speeds[link_kind] for speeds in bandwidths if link_kind in speeds]):
            continue
        median = statistics.median(kind_speeds)
        for rank, speeds in enumerate(bandwidths):
            if (speed := speeds.get(link_kind, median)) < least_share * median:
                text = f"rank {rank} moves {speed / 1e9:.2f} GB/s {link_kind}, the median rank {median / 1e9:.2f}"
                remedy = "exclude the node, or lower cluster.min_bandwidth_fraction"
                yield Finding("bad", f"node {topology[rank][0]}", text, remedy)


def describe_bandwidths(bandwidths: Sequence[Mapping[str, float]]) -> str:
    """Return one line with median and lowest bandwidth by kind of link."""
    lines = []
    for link_kind in (WITHIN, ACROSS, "all-reduce"):
        if speeds_of_kind := [speeds[link_kind] for speeds in bandwidths if link_kind in speeds]:
            lines.append(
                f"{link_kind} {statistics.median(speeds_of_kind) / 1e9:.1f} GB/s "
                f"(slowest rank {min(speeds_of_kind) / 1e9:.1f})"
            )
    return f"links: {', '.join(lines)}"
