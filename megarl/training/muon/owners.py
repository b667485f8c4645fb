"""Assignment of matrices to ranks and rounds, for Muon. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod


def assign_owners(costs: Mapping[str, int], holders: Mapping[str, Collection[int]], num_ranks: int) -> dict[str, int]:
    """Return the rank that updates each matrix, its owner.

    All ranks get about equal sums of `costs`. `holders` are the ranks that store parts of the matrix. One of them is
    the owner, unless another rank's sum is smaller by more than the matrix costs.
    """
    costs_by_rank = [0] * num_ranks
    owners = {}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        cost = costs[name]
        owner = min(range(num_ranks), key=lambda rank: costs_by_rank[rank] + cost * (rank not in holders[name]))
        owners[name] = owner
        costs_by_rank[owner] += cost
    return owners


def plan_rounds(owners: Mapping[str, int], shapes: Mapping[str, Sequence[int]]) -> list[dict[int, list[str]]]:
    """Return each owner's matrices by round. In a round, no rank has more elements than the largest matrix."""
    # The largest matrix needs this memory anyway, so smaller matrices may share a round.
    max_numel = max((prod(shapes[name]) for name in owners), default=0)
    rounds_of_owner: dict[int, list[list[str]]] = {}
    for name in sorted(owners, key=lambda name: (-prod(shapes[name]), name)):
        rounds = rounds_of_owner.setdefault(owners[name], [[]])
        if sum(prod(shapes[placed_name]) for placed_name in rounds[-1]) + prod(shapes[name]) > max_numel:
            rounds.append([])
        rounds[-1].append(name)
    num_rounds = max(map(len, rounds_of_owner.values()), default=0)
    return [
        {owner: rounds[index] for owner, rounds in sorted(rounds_of_owner.items()) if index < len(rounds)}
        for index in range(num_rounds)
    ]
