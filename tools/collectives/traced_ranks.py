"""Traces of many ranks, each in a process forked after the imports."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence

import torch

from tools.collectives.traced_rank import Trace, Work, trace

_work: list[Work] = []
"""The work of forked processes. They inherit it, so that nothing is pickled."""


def _trace(rank: int) -> Trace:
    return trace(_work[-1], rank)


def trace_ranks(work: Work, ranks: Sequence[int], num_processes: int) -> Iterator[Trace]:
    """Yield the traces of ranks as they end, from `num_processes` processes at a time.

    Megatron has one set of groups per process, so each rank has a process of its own.
    """
    # A thread pool of torch would not survive a fork.
    torch.set_num_threads(1)
    _work.append(work)
    try:
        with multiprocessing.get_context("fork").Pool(num_processes, maxtasksperchild=1) as pool:
            yield from pool.imap_unordered(_trace, ranks, chunksize=1)
    finally:
        _work.pop()
