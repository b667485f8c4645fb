"""The programs of all ranks of a job, from the traces of some: ranks that do the same work share traces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from megarl.config.parallel import ParallelConfig
from tools.collectives.programs import Call, Group, Job, Program, RankProgram

_OwnGroups = list[dict[str, list[int]]]
"""For each rank, the numbers of its groups by name, in the order of their creation."""


def part(parallel: ParallelConfig, rank: int) -> tuple[int, bool]:
    """Return a rank's pipeline stage, and whether it is the first of its tensor-parallel group.

    Ranks with equal parts have equal shards of the model, equally many rows, and equal places in their pipeline's
    group. All their other collectives have equal sizes on all members. So they make the same calls, each on its own
    groups. The first tensor-parallel ranks of the last stage make further calls: they gather and report results.
    """
    coordinates = parallel.coordinates(rank)
    return coordinates.pp, coordinates.tp == 0


def representatives(parallel: ParallelConfig) -> list[int]:
    """Return the first and the last rank of each part.

    They differ in all coordinates with more than one value in the part. A comparison of their traces tests the rule.
    """
    ends: dict[tuple[int, bool], tuple[int, int]] = {}
    for rank in range(parallel.world_size):
        rank_part = part(parallel, rank)
        ends[rank_part] = ends.get(rank_part, (rank, rank))[0], rank
    return sorted({rank for pair in ends.values() for rank in pair})


def _own_groups(groups: Sequence[Group]) -> _OwnGroups:
    """Return the groups of each rank. The first of `groups` is the world."""
    numbers_of_ranks: _OwnGroups = [defaultdict(list) for _ in groups[0].ranks]
    for number, group in enumerate(groups):
        for rank in group.ranks:
            numbers_of_ranks[rank][group.name].append(number)
    return numbers_of_ranks


def _match_groups(own_groups: _OwnGroups, traced: int, rank: int) -> dict[int, int]:
    """Return the numbers of a rank's groups by the numbers of a traced rank's groups.

    Groups correspond if they have the same name, in the order of their creation.
    """
    return {
        traced_number: number
        for name, numbers in own_groups[traced].items()
        for traced_number, number in zip(numbers, own_groups[rank][name], strict=True)
    }


def _first_traced(parallel: ParallelConfig, programs: Mapping[int, Program]) -> dict[tuple[int, bool], int]:
    """Return the first traced rank of each part."""
    return {part(parallel, rank): rank for rank in sorted(programs, reverse=True)}


def shared_job(
    parallel: ParallelConfig, groups: Sequence[Group], programs: Mapping[int, Program]
) -> tuple[Job, list[int]]:
    """Return the job of all ranks, given the programs of some by rank, and the ranks without any program.

    A rank takes the program of the first traced rank of its part. It needs one of its own if the program names peers
    by places that differ on the two ranks.
    """
    traced, own_groups = _first_traced(parallel, programs), _own_groups(groups)
    order = {rank: number for number, rank in enumerate(sorted(programs))}
    named = {rank: {call.group for call in program.calls if call.names_peers} for rank, program in programs.items()}
    ranks, missing = [], []
    for rank in range(parallel.world_size):
        source = rank if rank in programs else traced[part(parallel, rank)]
        group_numbers = {} if source == rank else _match_groups(own_groups, source, rank)
        if group_numbers and not all(
            groups[slot].ranks.index(source) == groups[group_numbers[slot]].ranks.index(rank) for slot in named[source]
        ):
            missing.append(rank)
        ranks.append(RankProgram(order[source], group_numbers))
    return Job(groups, [programs[rank] for rank in order], ranks), missing


def differing_ranks(parallel: ParallelConfig, groups: Sequence[Group], programs: Mapping[int, Program]) -> list[int]:
    """Return the traced ranks whose program is not that of their part's first one, after translation of the groups."""
    first, own_groups = _first_traced(parallel, programs), _own_groups(groups)
    differing = []
    for rank, program in programs.items():
        source = first[part(parallel, rank)]
        if source == rank:
            continue
        group_numbers = _match_groups(own_groups, source, rank)
        translated = [_translate(call, group_numbers) for call in programs[source].calls]
        if translated != list(program.calls) or list(programs[source].steps) != list(program.steps):
            differing.append(rank)
    return differing


def _translate(call: Call, groups: Mapping[int, int]) -> Call:
    return call._replace(group=groups.get(call.group, call.group))
