"""Search for the first recorded step in which two runs differ (`megarl replay --bisect`)."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

from megarl.rollout.step.step_record import (
    Difference,
    StepRecord,
    chain_of,
    differences,
    recorded_steps,
)
from megarl.tracking.run_folder import RECORDS
from megarl.tracking.run_record import RunRecord
from megarl.types import ConfigError


@dataclass(frozen=True, slots=True)
class Bisection:
    """First recorded step in which two runs differ, or None. `num_read` records of each run were read."""

    step: int | None
    differences: tuple[Difference, ...]
    last_step: int
    num_read: int


def bisect(first: Path, second: Path) -> Bisection:
    """Return the first recorded step in which two runs differ.

    With equal parallel sizes, a binary search reads about log2(steps) records: each has a checksum of all earlier ones
    (`StepRecord.chain`). Otherwise all records are compared. Raises ConfigError if the runs cannot be compared, or
    DataError for a damaged record.
    """
    for run in (first, second):
        RunRecord.open_of_this_version(run)
    common = sorted(recorded_steps(first / RECORDS) & recorded_steps(second / RECORDS))
    if not common:
        raise ConfigError(f"{first} and {second}: have no recorded step in common; record both with train.record")
    read: dict[int, tuple[StepRecord, StepRecord]] = {}

    def records_of(number: int) -> tuple[StepRecord, StepRecord]:
        if number not in read:
            read[number] = StepRecord.load(first / RECORDS, number), StepRecord.load(second / RECORDS, number)
        return read[number]

    def compare(number: int) -> tuple[Difference, ...]:
        first_record, second_record = records_of(number)
        if first_record.layout != second_record.layout and first_record.layout.get("dtype") != "float32":
            raise ConfigError(
                f"{first} and {second}: have different layouts, and only runs in float32 can be compared then"
            )
        return tuple(differences(first_record, second_record))

    looked_at: set[int] = set()

    def has_parted(number: int) -> bool:
        looked_at.add(number)
        return chain_of(first / RECORDS, number) != chain_of(second / RECORDS, number)

    first_last, second_last = records_of(common[-1])
    if first_last.layout == second_last.layout:
        place = bisect_left(common, True, key=has_parted)
        if place == len(common):
            return Bisection(None, (), common[-1], len(read.keys() | looked_at))
        if step_differences := compare(common[place]):
            return Bisection(common[place], step_differences, common[-1], len(read.keys() | looked_at))
    # Chains also differ if one run began to record later, or records other contents.
    for number in common:
        if step_differences := compare(number):
            return Bisection(number, step_differences, common[-1], len(read.keys() | looked_at))
    return Bisection(None, (), common[-1], len(read.keys() | looked_at))
