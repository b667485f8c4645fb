"""Sequences spread over data-parallel ranks and microbatches, balanced by the work they cost.

Data-parallel ranks meet at every microbatch where something is exchanged inside it (pipeline stages, experts), and at
the end of the step in any case. So a row, the microbatches that the ranks run at the same time, lasts as long as its
costliest member. What is kept small is first the number of rows, then the sum of these maxima.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

Bins = list[list[int]]


def pack(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    num_ranks: int,
    multiple: int = 1,
    rows_multiple: int = 1,
    attention_ratio: float = 65536.0,
) -> list[list[list[int]]]:
    """Sequence indices by rank and microbatch: [num_ranks][num_microbatches][sequences].

    Every sequence is in exactly one microbatch; every rank has the same number of microbatches; no microbatch exceeds
    `max_tokens` after each length was rounded up to `multiple`; none is empty while another holds two sequences.
    A sequence of l tokens costs l * (1 + l / attention_ratio): attention_ratio is the length at which attention takes
    as much work as everything else. The same arguments give the same packing.

    Raises ValueError for a sequence longer than `max_tokens`.
    """
    tokens = -(-np.asarray(lengths, dtype=np.int64) // multiple) * multiple
    if tokens.size and tokens.max() > max_tokens:
        place = int(tokens.argmax())
        raise ValueError(f"sequence {place} takes {tokens[place]} tokens, a microbatch holds at most {max_tokens}")
    costs = tokens * (1.0 + tokens / attention_ratio)
    longest_first = np.argsort(-tokens, kind="stable").tolist()
    tight = _fill_tightly(longest_first, tokens.tolist(), max_tokens)
    unit = num_ranks * rows_multiple
    num_bins = -(-max(1, len(tight)) // unit) * unit
    even = _fill_evenly(longest_first, tokens.tolist(), costs.tolist(), max_tokens, num_bins)
    candidates = [
        _balanced_rows(bins, tokens, costs, max_tokens, num_ranks, unit) for bins in (even, tight) if bins is not None
    ]
    rows = min(candidates, key=lambda rows: sum(max(costs[bin].sum() for bin in row) for row in rows))
    return [[sorted(row[rank]) for row in rows] for rank in range(num_ranks)]


def _fill_tightly(order: list[int], tokens: list[int], max_tokens: int) -> Bins:
    """Each into the fullest bin with room for it, else into a new one: few bins (best-fit decreasing)."""
    bins: Bins = []
    rooms: list[tuple[int, int]] = []
    for item in order:
        place = bisect_left(rooms, (tokens[item], 0))
        if place < len(rooms):
            room, bin = rooms.pop(place)
        else:
            room, bin = max_tokens, len(bins)
            bins.append([])
        bins[bin].append(item)
        insort(rooms, (room - tokens[item], bin))
    return bins


def _fill_evenly(
    order: list[int], tokens: list[int], costs: list[float], max_tokens: int, num_bins: int
) -> Bins | None:
    """Each into the cheapest bin with room for it: like costs. None if one fits nowhere."""
    bins: Bins = [[] for _ in range(num_bins)]
    room = [max_tokens] * num_bins
    loads = [(0.0, bin) for bin in range(num_bins)]
    heapify(loads)
    for item in order:
        full = []
        while loads and room[loads[0][1]] < tokens[item]:
            full.append(heappop(loads))
        if not loads:
            return None
        load, bin = heappop(loads)
        bins[bin].append(item)
        room[bin] -= tokens[item]
        for entry in (*full, (load + costs[item], bin)):
            heappush(loads, entry)
    return bins


def _balanced_rows(
    bins: Bins, tokens: NDArray[np.int64], costs: NDArray[np.float64], max_tokens: int, num_ranks: int, unit: int
) -> list[Bins]:
    """Bins of like cost side by side, [rows][num_ranks], then evened out within each row."""
    bins = bins + [[] for _ in range(-max(1, len(bins)) % unit + (not bins))]
    for bin in bins:
        if not bin and len(donor := max(bins, key=len)) > 1:
            bin.append(donor.pop())
    bins = sorted(bins, key=lambda bin: -costs[bin].sum())
    rows = [bins[start : start + num_ranks] for start in range(0, len(bins), num_ranks)]
    for row in rows:
        loads = np.array([costs[bin].sum() for bin in row])
        while _even_out(row, loads, tokens, costs, max_tokens):
            pass
    return rows


def _even_out(
    row: Bins, loads: NDArray[np.float64], tokens: NDArray[np.int64], costs: NDArray[np.float64], max_tokens: int
) -> bool:
    """Relieve the costliest bin of a row by one move or swap with another bin; False if none helps by 0.1 %."""
    high = int(loads.argmax())
    give = row[high]
    for low in np.argsort(loads, kind="stable").tolist():
        take = row[low]
        if (len(give) < 2 and not take) or loads[low] > 0.999 * loads[high]:
            return False
        moved = costs[give][:, None] - np.append(costs[take], 0.0)
        moved_tokens = tokens[give][:, None] - np.append(tokens[take], 0)
        fits = (tokens[take].sum() + moved_tokens <= max_tokens) & (tokens[give].sum() - moved_tokens <= max_tokens)
        after = np.where(fits & (moved > 0), np.maximum(loads[high] - moved, loads[low] + moved), np.inf)
        mine, theirs = divmod(int(after.argmin()), after.shape[1])
        if after[mine, theirs] < 0.999 * loads[high]:
            loads[high] -= moved[mine, theirs]
            loads[low] += moved[mine, theirs]
            returned = [take.pop(theirs)] if theirs < len(take) else []
            take.append(give.pop(mine))
            give += returned
            return True
    return False
