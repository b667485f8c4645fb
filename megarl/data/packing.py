"""Packing of sequences into microbatches of data-parallel ranks, balanced by compute cost.

Data-parallel ranks synchronise at the end of the step, and at every microbatch that communicates (pipeline stages,
experts). The microbatches that the ranks process at the same time form a row. A row lasts as long as its costliest
microbatch. So packing first minimises the number of rows, then the sum of the rows' maximum costs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.rounding import round_up

Bins = list[list[int]]
Costs = Callable[[NDArray[np.int64]], NDArray[np.float64]]
"""Function from sequence lengths to costs in any unit: both [sequences]."""
MOST_EXCHANGES = 70
"""Maximum number of exchanges of sequences in one packing. More take time and improve little."""
MOST_PARTNERS = 12
"""Maximum number of rows searched for an exchange, those with the most idle time first."""
WORTH_ANOTHER_START = 0.0075
"""Idle share of the ranks' time above which a second packing is tried. The better packing is used."""


class BalancedRows(NamedTuple):
    """Sets of sequences grouped into rows. All ranks process one row after the other."""

    rows: list[Bins]
    """Indices of the sets by row, then by rank: [rows][num_ranks][sets]."""
    makespan: float
    """Sum of the rows' maximum costs: the time of a rank in units of cost."""


def count_tokens(lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the lengths as costs, for a model of unknown size: both [sequences]."""
    return lengths.astype(np.float64)


def pack(
    lengths: Sequence[int] | NDArray[np.int64],
    *,
    max_tokens: int,
    num_ranks: int,
    multiple: int = 1,
    costs: Costs = count_tokens,
    rows_multiple: int = 1,
    together: int | NDArray[np.int64] = 1,
) -> list[list[list[int]]]:
    """Return sequence indices by rank and microbatch: [num_ranks][num_microbatches][sequences].

    Every sequence is in exactly one microbatch. Every rank has the same number of microbatches, a multiple of
    `rows_multiple`. No microbatch exceeds `max_tokens`, with each length rounded up to `multiple`. No microbatch is
    empty while another holds two sequences. `costs` gets the rounded lengths.

    `together` keeps adjacent sequences in one microbatch: n for sets of n, or an array [sets] of set sizes. The same
    arguments give the same packing.

    Raises ValueError for a sequence longer than `max_tokens`, and for fewer sequences than microbatches if
    `rows_multiple` is above 1.
    """
    padded_lengths = round_up(np.asarray(lengths, dtype=np.int64), multiple=multiple)
    sizes = np.full(len(padded_lengths) // together, together) if isinstance(together, int) else together
    starts = np.cumsum(sizes) - sizes
    set_costs = np.add.reduceat(costs(padded_lengths), starts)
    tokens = np.add.reduceat(padded_lengths, starts)
    if tokens.size and tokens.max() > max_tokens:
        largest_set = int(tokens.argmax())
        first_sequence, last_sequence = int(starts[largest_set]), int(starts[largest_set] + sizes[largest_set]) - 1
        subject = (
            f"sequence {first_sequence} takes"
            if first_sequence == last_sequence
            else f"sequences {first_sequence} to {last_sequence} take"
        )
        raise ValueError(
            f"{subject} {tokens.max()} tokens, but a microbatch holds at most {max_tokens}; raise "
            "trainer.max_tokens_per_microbatch"
        )
    description = f"{len(lengths)} sequences{_describe_sets(together)}"
    balanced = balance_sets(tokens, set_costs, max_tokens, num_ranks, rows_multiple, description)
    return expand_sets(
        balanced.rows, [range(set_start, set_start + size) for set_start, size in zip(starts, sizes, strict=True)]
    )


def expand_sets(rows: list[Bins], sets: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """Return sequence indices by rank and microbatch, in ascending order, from rows of sets."""
    by_rank = zip(*rows, strict=True)
    return [
        [sorted(int(sequence) for set_index in row for sequence in sets[set_index]) for row in rank] for rank in by_rank
    ]


def balance_sets(
    tokens: NDArray[np.int64],
    costs: NDArray[np.float64],
    max_tokens: int,
    num_ranks: int,
    rows_multiple: int,
    description: str,
) -> BalancedRows:
    """Group sets of sequences into rows of microbatches with similar costs.

    `tokens` and `costs` are [sets]. `description` names the sequences in an error. Raises ValueError if `rows_multiple`
    is above 1 and there are fewer sets than microbatches.
    """
    # Tight filling gives the fewest bins. Their number, rounded up, is that of all microbatches.
    # Stable, so equal lengths keep their order and the packing is the same on every platform.
    longest_first = np.argsort(-tokens, kind="stable").tolist()
    tight_bins = _fill_tightly(longest_first, tokens.tolist(), max_tokens)
    bins_step = num_ranks * rows_multiple
    # Rounded up: all ranks run the same number of microbatches.
    num_bins = round_up(max(1, len(tight_bins)), multiple=bins_step)
    if rows_multiple > 1 and len(tokens) < num_bins:
        raise ValueError(
            f"{description} cannot fill {num_bins} microbatches: each of {num_ranks} "
            f"ranks needs a multiple of {rows_multiple}; use more sequences per minibatch"
        )
    best_rows = BalancedRows([], np.inf)
    # Filling evenly may fail if the bins must be nearly full. Then only the tight filling below fits.
    if bins := _fill_evenly(longest_first, tokens.tolist(), costs.tolist(), max_tokens, num_bins):
        best_rows = _balance_rows(bins, tokens, costs, max_tokens, num_ranks)
    # The left side is the time of all ranks, the right side their work; the rest is waiting.
    if best_rows.makespan * num_ranks * (1 - WORTH_ANOTHER_START) > costs.sum():
        bins = _fill_to_common_level(longest_first, tokens.tolist(), max_tokens, num_bins)
        alternative_rows = _balance_rows(bins, tokens, costs, max_tokens, num_ranks)
        best_rows = min(best_rows, alternative_rows, key=lambda candidate: candidate.makespan)
    return best_rows


def _describe_sets(together: int | NDArray[np.int64]) -> str:
    if isinstance(together, int):
        return f" by {together}" if together > 1 else ""
    return f" in {len(together)} sets" if together.max(initial=1) > 1 else ""


def _fill_tightly(longest_first: list[int], tokens: list[int], max_tokens: int) -> Bins:
    """Put each sequence into the fullest bin with enough space, else into a new bin (best-fit decreasing).

    A sequence longer than `max_tokens` gets its own bin.
    """
    bins: Bins = []
    bins_by_free_tokens: list[tuple[int, int]] = []
    for item in longest_first:
        position = bisect_left(bins_by_free_tokens, (tokens[item], 0))
        if position < len(bins_by_free_tokens):
            free_tokens, bin = bins_by_free_tokens.pop(position)
        else:
            free_tokens, bin = max_tokens, len(bins)
            bins.append([])
        bins[bin].append(item)
        insort(bins_by_free_tokens, (free_tokens - tokens[item], bin))
    return bins


def _fill_to_common_level(longest_first: list[int], tokens: list[int], max_tokens: int, num_bins: int) -> Bins:
    """Fill bins up to a common level, about the lowest level at which `num_bins` bins suffice (MULTIFIT).

    So all bins have free space for later exchanges.
    """
    low, high, best_bins = sum(tokens) // num_bins, max_tokens, None
    # Five halvings find the level to 1/32 of its range; the exchanges even out the remainder.
    for _ in range(5):
        level = (low + high) // 2
        bins = _fill_tightly(longest_first, tokens, level)
        if len(bins) <= num_bins:
            high, best_bins = level, bins
        else:
            low = level
    best_bins = best_bins or _fill_tightly(longest_first, tokens, max_tokens)
    return best_bins + [[] for _ in range(num_bins - len(best_bins))]


def _fill_evenly(
    longest_first: list[int], tokens: list[int], costs: list[float], max_tokens: int, num_bins: int
) -> Bins | None:
    """Put each sequence into the cheapest bin with enough space. None: a sequence fits nowhere."""
    bins: Bins = [[] for _ in range(num_bins)]
    free_tokens = [max_tokens] * num_bins
    loads = [(0.0, bin) for bin in range(num_bins)]
    heapify(loads)
    for item in longest_first:
        full_bins = []
        while loads and free_tokens[loads[0][1]] < tokens[item]:
            full_bins.append(heappop(loads))
        if not loads:
            return None
        load, bin = heappop(loads)
        bins[bin].append(item)
        free_tokens[bin] -= tokens[item]
        for entry in (*full_bins, (load + costs[item], bin)):
            heappush(loads, entry)
    return bins


def _balance_rows(
    bins: Bins, tokens: NDArray[np.int64], costs: NDArray[np.float64], max_tokens: int, num_ranks: int
) -> BalancedRows:
    """Group bins of similar cost into rows, and exchange sets between bins to balance the rows."""
    # An empty microbatch wastes its rank's time in the row, so it gets a sequence from the bin with the most.
    for bin in bins:
        if not bin and len(fullest_bin := max(bins, key=len)) > 1:
            bin.append(fullest_bin.pop())
    bins = sorted(bins, key=lambda bin: -costs[bin].sum())
    # One empty item per bin follows the sets: exchanging a set for it only moves the set. The range gives empty item i
    # to bin i. Its negative entries are placeholders for the sets.
    bin_by_item = np.arange(-len(tokens), len(bins))
    for index, bin in enumerate(bins):
        bin_by_item[bin] = index
    tokens, costs = (np.append(values, np.zeros(len(bins), values.dtype)) for values in (tokens, costs))
    loads = np.bincount(bin_by_item, costs, len(bins)).astype(np.float64).reshape(-1, num_ranks)
    free_tokens = max_tokens - np.bincount(bin_by_item, tokens, len(bins)).astype(np.int64)
    is_settled = np.zeros(len(loads), dtype=bool)
    for _ in range(MOST_EXCHANGES):
        row = int(np.where(is_settled, -1.0, loads.max(axis=1) - loads.mean(axis=1)).argmax())
        # The worst row is within 0.1 % of its mean, so all rows are balanced.
        if is_settled[row] or loads[row].max() - loads[row].mean() < 1e-3 * loads[row].max():
            break
        is_settled[row] = not _exchange_one(row, bin_by_item, tokens, costs, loads, free_tokens)
    bins = [[] for _ in bins]
    for item, bin in enumerate(bin_by_item[: len(tokens) - len(bins)].tolist()):
        bins[bin].append(item)
    rows = [bins[first_bin : first_bin + num_ranks] for first_bin in range(0, len(bins), num_ranks)]
    return BalancedRows(rows, float(loads.max(axis=1).sum()))


def _exchange_one(
    row: int,
    bin_by_item: NDArray[np.int64],
    tokens: NDArray[np.int64],
    costs: NDArray[np.float64],
    loads: NDArray[np.float64],
    free_tokens: NDArray[np.int64],
) -> bool:
    """Exchange one sequence of a row's costliest bin for a sequence of another bin. False: no exchange saves 0.02 %."""
    exchange = _find_exchange(row, bin_by_item, tokens, costs, loads, free_tokens)
    if exchange is None:
        return False
    item, partner_item = exchange
    costliest_bin, partner_bin = bin_by_item[item], bin_by_item[partner_item]
    cost_change, token_change = costs[item] - costs[partner_item], tokens[item] - tokens[partner_item]
    for bin, sign in ((costliest_bin, -1), (partner_bin, 1)):
        loads.flat[bin] += sign * cost_change
        free_tokens[bin] -= sign * token_change
    bin_by_item[item] = partner_bin
    # The empty items stay in their bins: each bin has one for a sequence that it gets and gives none back.
    if partner_item < len(bin_by_item) - loads.size:
        bin_by_item[partner_item] = costliest_bin
    return True


def _find_exchange(
    row: int,
    bin_by_item: NDArray[np.int64],
    tokens: NDArray[np.int64],
    costs: NDArray[np.float64],
    loads: NDArray[np.float64],
    free_tokens: NDArray[np.int64],
) -> tuple[int, int] | None:
    """Return the best exchange: an item of a row's costliest bin, and an item of another bin. None: none saves 0.02 %.

    A bin of another row may grow only up to its row's maximum. In the same row, both bins must end below the old
    maximum.
    """
    num_bins, num_ranks = loads.size, loads.shape[1]
    costliest_bin = row * num_ranks + int(loads[row].argmax())
    max_load, mean_load = loads[row].max(), loads[row].mean()
    # Candidates: items of the costliest bin, and of the rows with the most slack (time below their maximum).
    candidate_items = np.flatnonzero(bin_by_item[:-num_bins] == costliest_bin)
    slack = loads.max(axis=1, keepdims=True) - loads
    is_partner_row = np.zeros(len(loads), dtype=bool)
    is_partner_row[np.argsort(-slack.max(axis=1))[:MOST_PARTNERS]] = True
    is_partner_row[row] = True
    partner_items = np.flatnonzero(np.repeat(is_partner_row, num_ranks)[bin_by_item])
    # A bin with a single sequence must get one back, or it would be empty: so the empty items are excluded.
    if len(candidate_items) < 2:
        partner_items = partner_items[partner_items < len(bin_by_item) - num_bins]
    partner_bins = bin_by_item[partner_items]
    moved_cost = costs[candidate_items, None] - costs[partner_items]
    moved_tokens = tokens[candidate_items, None] - tokens[partner_items]
    # An exchange must relieve the costliest bin by 0.02 %: smaller ones cost time and gain nothing.
    is_useful = (
        (moved_cost > 2e-4 * max_load)
        & (moved_cost < slack.ravel()[partner_bins])
        & (moved_tokens <= free_tokens[partner_bins])
        & (moved_tokens >= -free_tokens[costliest_bin])
    )
    # Within the row, the costlier of both bins counts. With another row, relief below this row's mean gains little.
    loads_after = np.maximum(max_load - moved_cost, mean_load) + 1e-3 * moved_cost
    is_same_row = partner_bins // num_ranks == row
    loads_after[:, is_same_row] = np.maximum(
        loads_after[:, is_same_row], loads.ravel()[partner_bins[is_same_row]] + moved_cost[:, is_same_row]
    )
    loads_after[~is_useful] = np.inf
    if not loads_after.size or not loads_after.min() < (1 - 2e-4) * max_load:
        return None
    item_index, partner_index = divmod(int(loads_after.argmin()), len(partner_items))
    return int(candidate_items[item_index]), int(partner_items[partner_index])
