"""Speeds of a CPU rank: matrix products of one thread, memory copies, and all-reduces over gloo.

Both ranks are probed at the same time, as they work in a run: they share caches and memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import mean, median
from typing import NamedTuple

import torch
import torch.distributed as dist

from tests.rank_pool import RankPool

_REPEATS = 15
_FEW_TOKENS, _MANY_TOKENS = 64, 1024
"""Rows of the two matrix products. Their times give a rate, and the fixed time of a product."""
_COPIED_BYTES = 64 << 20
"""Larger than the last-level cache of a core, so that copies use the memory."""


class CpuSpeeds(NamedTuple):
    """Speeds of one of two CPU ranks."""

    flops: float
    """float32 FLOPs per second of large matrix products on a rank's threads."""
    half_tokens: float
    """Tokens at which a matrix product has half of this rate."""
    memory: float
    """Bytes per second of a copy, reads plus writes."""
    link: float
    """Bytes per second that a rank sends in an all-reduce of `message_bytes`, latency included."""
    latency: float
    """Seconds of a small all-reduce."""


def measure(*, hidden_size: int, intermediate_size: int, message_bytes: int) -> CpuSpeeds:
    """Return the speeds of two CPU ranks: means of both, and for all-reduces the slower rank.

    Products have the sizes of a feed-forward layer. `message_bytes`: size of a large all-reduce, here the activations
    of a row.
    """
    with RankPool(2, imports=["torch"]) as ranks:
        speeds = ranks.run(probe, hidden_size, intermediate_size, message_bytes)
    flops, half_tokens, memory, link, latency = zip(*speeds, strict=True)
    return CpuSpeeds(mean(flops), mean(half_tokens), mean(memory), min(link), max(latency))


def probe(hidden_size: int, intermediate_size: int, message_bytes: int) -> tuple[float, ...]:
    """Return the speeds of this rank, in the order of `CpuSpeeds`."""
    weight = torch.randn(hidden_size, intermediate_size)
    inputs = torch.randn(_MANY_TOKENS, hidden_size)
    few, many = (_seconds(lambda rows=inputs[:size]: rows @ weight) for size in (_FEW_TOKENS, _MANY_TOKENS))
    token_seconds = (many - few) / (_MANY_TOKENS - _FEW_TOKENS)
    # Noise can make the fixed time of a product negative.
    half_tokens = max(0.0, few / token_seconds - _FEW_TOKENS)
    source = torch.ones(_COPIED_BYTES // 4)
    target = torch.empty_like(source)
    copied = _seconds(lambda: target.copy_(source))
    message, short = torch.zeros(message_bytes // 4), torch.zeros(4)
    reduced = _seconds(lambda: dist.all_reduce(message))
    latency = _seconds(lambda: dist.all_reduce(short))
    flops = 2.0 * hidden_size * intermediate_size / token_seconds
    # In an all-reduce over two ranks each sends as many bytes as the message has.
    return flops, half_tokens, 2 * _COPIED_BYTES / copied, message_bytes / reduced, latency


def _seconds(work: Callable[[], object]) -> float:
    """Return the median seconds of some work that all ranks begin together."""
    seconds = []
    # The first calls allocate memory and open connections.
    for number in range(_REPEATS + 2):
        dist.barrier()
        started = time.perf_counter()
        work()
        if number >= 2:
            seconds.append(time.perf_counter() - started)
    return median(seconds)
