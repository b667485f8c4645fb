"""Faults put into one rank's program, to see that a check finds and names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tools.collectives.programs import Call, Job, Program, RankProgram


def with_skipped_call(job: Job, rank: int, index: int) -> Job:
    """Return a job in which a rank leaves out one call."""
    program = job.programs[job.ranks[rank].program]
    calls = [*program.calls[:index], *program.calls[index + 1 :]]
    steps = [_renumber(step, index) for step in program.steps if step not in (index, ~index)]
    return _with_program(job, rank, Program(calls, steps))


def _renumber(step: int, removed: int) -> int:
    number = step if step >= 0 else ~step
    number -= number > removed
    return number if step >= 0 else ~number


def with_swapped_calls(job: Job, rank: int, index: int) -> Job:
    """Return a job in which a rank makes a call after the next one."""
    program = job.programs[job.ranks[rank].program]
    calls = list(program.calls)
    calls[index], calls[index + 1] = calls[index + 1], calls[index]
    return _with_program(job, rank, Program(calls, program.steps))


def _with_program(job: Job, rank: int, program: Program) -> Job:
    ranks = list(job.ranks)
    ranks[rank] = RankProgram(len(job.programs), ranks[rank].groups)
    return replace(job, programs=[*job.programs, program], ranks=ranks)


def collective_in_the_middle(job: Job, rank: int) -> int:
    """Return the number of a collective with another rank, from the middle of a rank's program."""
    calls = _calls(job, rank)
    return next(index for index in range(len(calls) // 2, len(calls)) if len(_members(job, rank, calls[index])) > 1)


def pair_in_the_middle(job: Job, rank: int) -> int:
    """Return the number of a collective, from the middle of a rank's program, that must come before the next one.

    Both have different groups with a further common member. If one rank swaps them, that member and the rank wait for
    each other.
    """
    calls = _calls(job, rank)

    def is_ordered(index: int) -> bool:
        call, next_call = calls[index], calls[index + 1]
        common = _members(job, rank, call) & _members(job, rank, next_call)
        return call.group != next_call.group and not call.on_host and not next_call.on_host and len(common) > 1

    places = [*range(len(calls) // 2, len(calls) - 1), *range(len(calls) // 2)]
    return next(index for index in places if is_ordered(index))


def _calls(job: Job, rank: int) -> Sequence[Call]:
    return job.programs[job.ranks[rank].program].calls


def _members(job: Job, rank: int, call: Call) -> set[int]:
    """Return the members of a collective's group; none for messages."""
    return set() if call.is_message else set(job.groups[job.ranks[rank].group(call.group)].ranks)
