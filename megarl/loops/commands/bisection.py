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


class _RunPair:
    """The step records of two runs. Each record is read once."""

    def __init__(self, first: Path, second: Path) -> None:
        self._first, self._second = first, second
        self._records_by_step: dict[int, tuple[StepRecord, StepRecord]] = {}
        self._compared_chains: set[int] = set()

    @property
    def num_read(self) -> int:
        return len(self._records_by_step.keys() | self._compared_chains)

    def load(self, step: int) -> tuple[StepRecord, StepRecord]:
        if step not in self._records_by_step:
            first_record, second_record = (StepRecord.load(run / RECORDS, step) for run in (self._first, self._second))
            self._records_by_step[step] = first_record, second_record
        return self._records_by_step[step]

    def list_differences(self, step: int) -> tuple[Difference, ...]:
        """Return the differences of a step's records.

        Raises ConfigError if their layouts differ and they are not in float32: rounding could explain any difference.
        """
        first_record, second_record = self.load(step)
        if first_record.layout != second_record.layout and first_record.layout.get("dtype") != "float32":
            raise ConfigError(
                f"{self._first} and {self._second}: have different layouts, and only runs in float32 can be compared "
                "then"
            )
        return tuple(find_differences(first_record, second_record))

    def differ_until(self, step: int) -> bool:
        """Return whether the runs differ in this or an earlier step."""
        self._compared_chains.add(step)
        return chain_of(self._first / RECORDS, step) != chain_of(self._second / RECORDS, step)


def bisect(first_run: Path, second_run: Path) -> Bisection:
    """Return the first recorded step in which two runs differ.

    With equal parallel sizes, a binary search reads about log2(steps) records: each has a checksum of all earlier ones
    (`StepRecord.chain`). Otherwise all records are compared. Raises ConfigError if the runs cannot be compared, or
    DataError for a damaged record.
    """
    for run in (first_run, second_run):
        RunRecord.open_of_this_version(run)
    common_steps = sorted(recorded_steps(first_run / RECORDS) & recorded_steps(second_run / RECORDS))
    if not common_steps:
        raise ConfigError(
            f"{first_run} and {second_run} have no recorded step in common; record both with train.record"
        )
    records = _RunPair(first_run, second_run)
    last_step = common_steps[-1]
    first_run_record, second_run_record = records.load(last_step)
    if first_run_record.layout == second_run_record.layout:
        index = bisect_left(common_steps, True, key=records.differ_until)
        if index == len(common_steps):
            return Bisection(None, (), last_step, records.num_read)
        if step_differences := records.list_differences(common_steps[index]):
            return Bisection(common_steps[index], step_differences, last_step, records.num_read)
    # Compare step by step: chains also differ if the runs have different parallel sizes, if one run began to record
    # later, or if it records other contents.
    for step in common_steps:
        if step_differences := records.list_differences(step):
            return Bisection(step, step_differences, last_step, records.num_read)
    return Bisection(None, (), last_step, records.num_read)
