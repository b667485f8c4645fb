"""The programs of all ranks of a job, from the traces of some: replicas share traces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from megarl.config.parallel import ParallelConfig
from tools.collectives.programs import Call, Group, Job, Program, RankProgram


def coordinate(layout: ParallelConfig, rank: int) -> tuple[int, ...]:
    """Return the coordinates of a rank without those of its replica: tp, cp, pp, etp, ep.

    Ranks with equal ones have equal shards of the model, equally many rows, and equal places in all their groups except
    those over replicas. Collectives over replicas have equal sizes on all members.
    """
    at = layout.coordinates(rank)
    return at.tp, at.cp, at.pp, at.etp, at.ep


def representatives(layout: ParallelConfig) -> list[int]:
    """Return one rank for each distinct coordinate: the first one."""
    first: dict[tuple[int, ...], int] = {}
    for rank in range(layout.world_size):
        first.setdefault(coordinate(layout, rank), rank)
    return sorted(first.values())


def own_groups(groups: Sequence[Group], traced: int, rank: int) -> dict[int, int]:
    """Return the numbers of a rank's groups by the numbers of a traced rank's groups.

    Groups correspond if they have the same name, in the order of their creation.
    """
    found: dict[int, dict[str, list[int]]] = {}
    for member in (traced, rank):
        found[member] = defaultdict(list)
        for number, group in enumerate(groups):
            if member in group.ranks:
                found[member][group.name].append(number)
    return {
        here: there
        for name, numbers in found[traced].items()
        for here, there in zip(numbers, found[rank][name], strict=True)
    }


def shared_job(
    layout: ParallelConfig, groups: Sequence[Group], programs: Mapping[int, Program]
) -> tuple[Job, list[int]]:
    """Return the job of all ranks, given the programs of some by rank, and the ranks without any program.

    A rank takes the program of a traced rank with its coordinate. It needs one of its own if the program names peers by
    places that differ on the two ranks.
    """
    traced = {coordinate(layout, rank): rank for rank in sorted(programs, reverse=True)}
    order = sorted(programs)
    ranks, missing = [], []
    for rank in range(layout.world_size):
        source = rank if rank in programs else traced[coordinate(layout, rank)]
        own = {} if source == rank else own_groups(groups, source, rank)
        if source != rank and not _has_equal_places(groups, programs[source], own, source, rank):
            missing.append(rank)
        ranks.append(RankProgram(order.index(source), own))
    return Job(groups, [programs[rank] for rank in order], ranks), missing


def _has_equal_places(
    groups: Sequence[Group], program: Program, own: Mapping[int, int], source: int, rank: int
) -> bool:
    """Return whether all groups in which the program names peers have the two ranks at the same place."""
    named = {call.group for call in program.calls if call.names_peers}
    return all(groups[slot].ranks.index(source) == groups[own[slot]].ranks.index(rank) for slot in named)


def differing_ranks(layout: ParallelConfig, groups: Sequence[Group], programs: Mapping[int, Program]) -> list[int]:
    """Return the ranks whose program is not that of the first rank with their coordinate, after translation.

    `programs` are those of all ranks.
    """
    first = {coordinate(layout, rank): rank for rank in sorted(programs, reverse=True)}
    found = []
    for rank, program in programs.items():
        source = first[coordinate(layout, rank)]
        if source == rank:
            continue
        own = own_groups(groups, source, rank)
        translated = [_moved(call, own) for call in programs[source].calls]
        if translated != list(program.calls) or list(programs[source].steps) != list(program.steps):
            found.append(rank)
    return found


def _moved(call: Call, groups: Mapping[int, int]) -> Call:
    return call._replace(group=groups.get(call.group, call.group))
