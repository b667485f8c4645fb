"""The calls that ranks make on process groups, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Group(NamedTuple):
    """A process group: its name, and its global ranks in the order of their group ranks."""

    name: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        numbers = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
        return f"{self.name} [{numbers}]"


class Call(NamedTuple):
    """One call of a rank on a process group.

    `group` is a number of `Job.groups`. `size` is a number of elements, equal on all members: of the tensor to be
    reduced or broadcast, of the part to be gathered, of the scattered result. `setting` is the reduction or the root.
    `sends` and `receives` list (group rank or `EVERY_OTHER`, elements), for messages and exchanges of all with all.
    `lane` is the pair of group ranks of a single message. Batches of messages and collectives have none.
    """

    operation: str
    group: int
    on_host: bool
    dtype: str
    size: int = 0
    setting: str = ""
    sends: tuple[tuple[int, int], ...] = ()
    receives: tuple[tuple[int, int], ...] = ()
    lane: tuple[int, int] | None = None
    place: str = ""
    """File and line of the caller."""

    @property
    def is_message(self) -> bool:
        """Whether only the named pairs take part, instead of the whole group."""
        return self.operation == MESSAGES

    @property
    def names_peers(self) -> bool:
        """Whether the call lists some peers by their places in the group."""
        return any(peer != EVERY_OTHER for peer, _ in (*self.sends, *self.receives))

    @property
    def signature(self) -> tuple[str, str, int, str]:
        """The part of a collective on which all members must agree."""
        return self.operation, self.dtype, self.size, self.setting

    def __str__(self) -> str:
        sides = [f"{n} elements to {peer}" for peer, n in self.sends] + [
            f"{n} elements from {peer}" for peer, n in self.receives
        ]
        content = f" ({', '.join(sides[:4])})" if self.is_message else f" of {self.size} elements" if self.size else ""
        setting = f" {self.setting}" if self.setting else ""
        where = f" at {self.place}" if self.place else ""
        return f"{self.operation}{setting} {self.dtype}{content}{where}"


EVERY_OTHER = -1
"""In place of a peer: each member of the group except the rank itself."""
MESSAGES = "messages"
"""Operation of sends and receives: one of them, or a batch that is started together."""


@dataclass(frozen=True, slots=True)
class Program:
    """The calls of a rank, in the order of their starts.

    `steps` lists what the rank does: i starts call i, and ~i waits until call i has ended.
    """

    calls: Sequence[Call]
    steps: Sequence[int]

    @classmethod
    def blocking(cls, calls: Sequence[Call]) -> Program:
        """Return a program that waits for each call before it starts the next one."""
        return cls(calls, [step for index in range(len(calls)) for step in (index, ~index)])


@dataclass(frozen=True, slots=True)
class RankProgram:
    """The program of one rank: a number of `Job.programs`, and the rank's own groups in place of the program's.

    Ranks that differ in their data-parallel coordinates share a program. Groups that are not in `groups` stay.
    """

    program: int
    groups: Mapping[int, int] = field(default_factory=dict)

    def group(self, number: int) -> int:
        """Return the number of this rank's own group for a group of the program."""
        return self.groups.get(number, number)


@dataclass(frozen=True, slots=True)
class Job:
    """The programs of all ranks of a job; `ranks` is ordered by rank."""

    groups: Sequence[Group]
    programs: Sequence[Program]
    ranks: Sequence[RankProgram]

    @classmethod
    def of_programs(cls, groups: Sequence[Group], programs: Sequence[Program]) -> Job:
        """Return a job with one program for each rank."""
        return cls(groups, programs, [RankProgram(number) for number in range(len(programs))])

    @property
    def num_calls(self) -> int:
        """Number of calls of all ranks."""
        return sum(len(self.programs[rank.program].calls) for rank in self.ranks)
