"""Ranks that progress equally, so that one of them stands for all in an execution of a job.

Two ranks progress equally if they run the same program, and each group of the one has members that progress like those
of the same group of the other. The partition of all ranks with this property is found by colour refinement. By
induction over the calls, a call of one rank ends if and only if the same call of the other ends. Execution with one
rank of each class therefore ends if and only if the execution with all ranks does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tools.collectives.agreement import Member, members_by_group
from tools.collectives.programs import Group, Job, RankProgram


def reduce_job(job: Job) -> Job:
    """Return a job with one rank of each class of ranks that progress equally. Returns the job itself if that fails.

    It fails if two ranks of a class are in one group whose calls tell them apart: they exchange messages, or use the
    group in different places of their program.
    """
    groups = members_by_group(job)
    exchanging = _exchanging(job, groups)
    colors, signs = _refine(job, groups, exchanging)
    for number, members in groups.items():
        places = {(colors[member.rank], member.slot) for member in members}
        num_colors = len({color for color, _ in places})
        if num_colors < len(places) or (number in exchanging and num_colors < len(members)):
            return job
    first: dict[int, int] = {}
    for rank, color in enumerate(colors):
        first.setdefault(color, rank)
    new_rank = {color: place for place, color in enumerate(first)}
    new_numbers: dict[int, int] = {}
    new_groups: list[Group] = []
    for number, members in groups.items():
        if signs[number] not in new_numbers:
            new_numbers[signs[number]] = len(new_groups)
            ranks = dict.fromkeys(new_rank[colors[member.rank]] for member in members)
            new_groups.append(Group(job.groups[number].name, tuple(ranks)))
    slots = [sorted({call.group for call in program.calls}) for program in job.programs]
    ranks = [
        RankProgram(program.program, {slot: new_numbers[signs[program.group(slot)]] for slot in slots[program.program]})
        for program in (job.ranks[rank] for rank in first.values())
    ]
    return Job(new_groups, job.programs, ranks)


def _exchanging(job: Job, groups: Mapping[int, Sequence[Member]]) -> set[int]:
    """Return the numbers of the groups in which members send messages to each other."""
    slots = [{call.group for call in program.calls if call.is_message} for program in job.programs]
    return {
        number for number, members in groups.items() if any(member.slot in slots[member.program] for member in members)
    }


def _refine(job: Job, groups: Mapping[int, Sequence[Member]], exchanging: set[int]) -> tuple[list[int], dict[int, int]]:
    """Return a class for each rank, and a number for each group. Groups with members of equal classes have equal
    numbers.
    """
    group_places: list[dict[int, tuple[int, int]]] = [{} for _ in job.ranks]
    """For each rank: a group and the rank's place in it, by the group's number in the program."""
    for number, members in groups.items():
        for place, member in enumerate(members):
            if member.slot >= 0:
                group_places[member.rank][member.slot] = number, place if number in exchanging else 0
    ordered = [[used[slot] for slot in sorted(used)] for used in group_places]
    colors = [rank.program for rank in job.ranks]
    while True:
        known_signs: dict[tuple[tuple[int, int], ...], int] = {}
        signs: dict[int, int] = {}
        for number, members in groups.items():
            sign = [(colors[member.rank], member.slot) for member in members]
            # Places matter only for messages, because these name their peers.
            sign = tuple(sign if number in exchanging else sorted(sign))
            signs[number] = known_signs.setdefault(sign, len(known_signs))
        known_colors: dict[tuple[int, tuple[tuple[int, int], ...]], int] = {}
        new_colors = [
            known_colors.setdefault(
                (colors[rank], tuple((signs[number], place) for number, place in used)), len(known_colors)
            )
            for rank, used in enumerate(ordered)
        ]
        if len(known_colors) == len(set(colors)):
            return colors, signs
        colors = new_colors
