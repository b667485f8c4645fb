"""Search for the first recorded step in which two runs differ (`megarl replay --bisect`)."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

from megarl.rollout.step.step_record import (
    Difference,
    StepRecord,
    chain_of,
    find_differences,
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
    common_steps = sorted(recorded_steps(first / RECORDS) & recorded_steps(second / RECORDS))
    if not common_steps:
        raise ConfigError(f"{first} and {second} have no recorded step in common; record both with train.record")
    records_by_step: dict[int, tuple[StepRecord, StepRecord]] = {}

    def load_records(step: int) -> tuple[StepRecord, StepRecord]:
        if step not in records_by_step:
            records_by_step[step] = StepRecord.load(first / RECORDS, step), StepRecord.load(second / RECORDS, step)
        return records_by_step[step]

    def list_differences(step: int) -> tuple[Difference, ...]:
        first_record, second_record = load_records(step)
        if first_record.layout != second_record.layout and first_record.layout.get("dtype") != "float32":
            raise ConfigError(
                f"{first} and {second}: have different layouts, and only runs in float32 can be compared then"
            )
        return tuple(find_differences(first_record, second_record))

    compared_chains: set[int] = set()

    def count_read() -> int:
        return len(records_by_step.keys() | compared_chains)

    def differs_until(step: int) -> bool:
        compared_chains.add(step)
        return chain_of(first / RECORDS, step) != chain_of(second / RECORDS, step)

    first_run_last, second_run_last = load_records(common_steps[-1])
    if first_run_last.layout == second_run_last.layout:
        index = bisect_left(common_steps, True, key=differs_until)
        if index == len(common_steps):
            return Bisection(None, (), common_steps[-1], count_read())
        if step_differences := list_differences(common_steps[index]):
            return Bisection(common_steps[index], step_differences, common_steps[-1], count_read())
    # Compare step by step: chains also differ if the runs have different parallel sizes, if one run began to record
    # later, or if it records other contents.
    for step in common_steps:
        if step_differences := list_differences(step):
            return Bisection(step, step_differences, common_steps[-1], count_read())
    return Bisection(None, (), common_steps[-1], count_read())
