"""Samples of a run, read from its folder and selected for an HTML page."""

from __future__ import annotations

import hashlib
import json
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megarl.files.record_files import json_lines
from megarl.report.sample_text import as_list, compact, is_finite_number, short_number, token_columns
from megarl.tracking.run_record import RunRecord

STEPS_READ = 40
"""Maximum number of steps whose samples are read, including the first and the last."""
BYTES_READ = 2 << 30
"""Maximum number of bytes of samples/ read for a page. With larger files, fewer steps are read."""

_NUM_EXTREME = 5
"""Number of a step's samples shown with the highest rewards, and with the lowest."""
_NUM_CHANGED = 8
"""Number of held-out problems with changed answers in the report."""
_NUM_TURNS = 4
"""Number of multi-turn attempts shown for each step."""
_NUM_TOKEN_STEPS = 6
"""Number of steps with samples shown token by token."""
_NUM_RECORDS_WITH_TOKENS = 24
"""Maximum number of samples shown token by token."""


def read_records(path: Path, step: int) -> Iterator[dict[str, Any]]:
    for line, record in enumerate(json_lines(path), 1):
        yield {**record, "step": step, "line": line}


def spread(items: Sequence[Any], max_items: int) -> list[Any]:
    if len(items) <= max_items:
        return list(items)
    return [items[round(number * (len(items) - 1) / (max_items - 1))] for number in range(max_items)]


def summarise_samples(run: RunRecord) -> dict[str, Any]:
    """Return the samples for a page about a run, as JSON values.

    rewards, lengths  histograms of training samples by step
    best, worst       samples with extreme rewards, newest first
    changed           validation problems with the largest change from the first to the last evaluation
    turns             multi-turn attempts
    tokens            samples written token by token
    read, there       numbers of steps with samples: read, and existing
    """
    files = run.sample_files
    by_step: list[tuple[int, list[dict[str, Any]]]] = []
    held_out: dict[str, _FirstAndLastEvaluation] = {}
    best: list[dict[str, Any]] = []
    worst: list[dict[str, Any]] = []
    turns: list[dict[str, Any]] = []
    read_files = _steps_to_read(files)
    # Show texts of four steps only, to keep the page small. Numbers come from all steps read.
    shown_steps = {step for step, _ in spread(read_files, 4)}
    for step, path in read_files:
        step_samples = _read_step(path, step, held_out, with_texts=step in shown_steps)
        by_step.append((step, step_samples.numbers))
        best += step_samples.best
        worst += step_samples.worst
        turns += step_samples.multi_turn
    return {
        "read": len(read_files),
        "there": len(files),
        "rewards": histograms(by_step, "reward"),
        "lengths": histograms(by_step, "tokens"),
        "best": [compact(record) for record in _newest_first(best)],
        "worst": [compact(record) for record in _newest_first(worst)],
        "changed": _select_changed(held_out, dict(files)),
        "turns": [compact(record) for record in reversed(turns)],
        "tokens": _token_samples(run),
    }


class _StepSamples(NamedTuple):
    """Numbers of a step's training samples, and the records to show."""

    numbers: list[dict[str, Any]]
    best: list[dict[str, Any]]
    worst: list[dict[str, Any]]
    multi_turn: list[dict[str, Any]]


def _read_step(
    path: Path, step: int, held_out: dict[str, _FirstAndLastEvaluation], *, with_texts: bool
) -> _StepSamples:
    """Read a step's samples. Those of validation sets are added to `held_out`."""
    numbers: list[dict[str, Any]] = []
    highest, lowest, multi_turn = (
        _Extreme(_NUM_EXTREME, sign=-1),
        _Extreme(_NUM_EXTREME, sign=1),
        _MultiTurnExtremes(),
    )
    for record in read_records(path, step):
        # Only records of validation sets have `set`. They are compared between evaluations, if they are scored.
        if "set" in record:
            if is_finite_number(record.get("reward")):
                held_out.setdefault(_problem_digest(record), _FirstAndLastEvaluation()).add(record)
        else:
            numbers.append(_numbers(record))
        if with_texts:
            multi_turn.add(record)
            if "set" not in record:
                highest.add(record)
                lowest.add(record)
    # With few samples, a record may be both best and worst.
    best_lines = {record["line"] for record in highest.records}
    worst = [record for record in lowest.records if record["line"] not in best_lines]
    return _StepSamples(numbers, highest.records, worst, multi_turn.records)


def histograms(by_step: Sequence[tuple[int, Sequence[Mapping[str, Any]]]], name: str, bins: int = 24) -> dict[str, Any]:
    """Return histograms of a number by step: `edges` [bins + 1], `steps`, `counts` [steps][bins].

    With few distinct values, each has its own bin, and `values` replaces `edges`. Empty: no numbers.
    """
    numbers_by_step = [
        (step, [float(record[name]) for record in records if is_finite_number(record.get(name))])
        for step, records in by_step
    ]
    numbers_by_step = [(step, numbers) for step, numbers in numbers_by_step if numbers]
    distinct_numbers = sorted({number for _, numbers in numbers_by_step for number in numbers})
    if not distinct_numbers:
        return {}
    steps = [step for step, _ in numbers_by_step]
    # Rewards are often only 0 and 1, so bins in between would be empty.
    if len(distinct_numbers) <= 8:
        counts = [[numbers.count(value) for value in distinct_numbers] for _, numbers in numbers_by_step]
        return {"values": distinct_numbers, "steps": steps, "counts": counts}
    low, high = distinct_numbers[0], distinct_numbers[-1]
    width = (high - low) / bins
    counts = []
    for _, numbers in numbers_by_step:
        bin_counts = [0] * bins
        for number in numbers:
            # The largest number lies on the last edge, so it goes into the last bin.
            bin_counts[min(bins - 1, int((number - low) / width))] += 1
        counts.append(bin_counts)
    return {"edges": [low + width * edge for edge in range(bins + 1)], "steps": steps, "counts": counts}


def _newest_first(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(records, key=lambda record: -record["step"])


class _LowestKeys:
    """Collects the records with the smallest keys, up to a maximum number. Keys must be unique."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._records: list[tuple[tuple[float, ...], dict[str, Any]]] = []

    def add(self, key: tuple[float, ...], record: Mapping[str, Any]) -> None:
        """Add a record, unless enough records have lower keys."""
        # Retain only a few records, because a step's file may have thousands of long ones.
        if len(self._records) < self._capacity or (self._records and key < self._records[-1][0]):
            insort(self._records, (key, dict(record)), key=lambda item: item[0])
            del self._records[self._capacity :]

    @property
    def records(self) -> list[dict[str, Any]]:
        return [record for _, record in self._records]


class _Extreme:
    """Collects the samples with the lowest (`sign` 1) or highest (-1) rewards. Among equal rewards, problems differ."""

    def __init__(self, capacity: int, *, sign: int) -> None:
        self._lowest = _LowestKeys(capacity)
        self._sign = sign
        self._ties: Counter[tuple[str, float]] = Counter()
        self._number = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a sample's record. A record without a reward is skipped."""
        if not is_finite_number(record.get("reward")):
            return
        problem_and_reward = (_problem_digest(record), float(record["reward"]))
        self._number += 1
        # Sort ties by the number of equal earlier records, to prefer other problems. The last number makes keys unique.
        self._lowest.add(
            (self._sign * problem_and_reward[1], self._ties[problem_and_reward], record["line"], self._number), record
        )
        self._ties[problem_and_reward] += 1

    @property
    def records(self) -> list[dict[str, Any]]:
        return self._lowest.records


class _MultiTurnExtremes:
    """Collects at most four multi-turn attempts, with the highest and the lowest rewards."""

    def __init__(self) -> None:
        self._high, self._low = _LowestKeys(_NUM_TURNS // 2), _LowestKeys(_NUM_TURNS // 2)

    def add(self, record: Mapping[str, Any]) -> None:
        # One turn is a plain sample, which is shown elsewhere.
        if len(as_list(record.get("turns"))) < 2:
            return
        self._high.add((-_reward(record), record["line"]), record)
        self._low.add((_reward(record), -record["line"]), record)

    @property
    def records(self) -> list[dict[str, Any]]:
        by_line = {record["line"]: record for record in [*self._high.records, *reversed(self._low.records)]}
        return list(by_line.values())


def select_extreme(records: Iterable[Mapping[str, Any]], count: int, *, sign: int) -> list[dict[str, Any]]:
    """Return the records with the lowest (`sign` 1) or highest (-1) rewards. Among equal rewards, problems differ."""
    collector = _Extreme(count, sign=sign)
    for record in records:
        collector.add(record)
    return collector.records


@dataclass(slots=True)
class _EvaluatedProblem:
    """A validation problem in one evaluation: line, reward and hash of the completion for each sample."""

    step: int
    samples: list[tuple[int, float, bytes]] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return sum(reward for _, reward, _ in self.samples) / len(self.samples)

    @property
    def completions(self) -> list[bytes]:
        return sorted(completions for *_, completions in self.samples)

    @property
    def representative(self) -> tuple[int, int]:
        mean = self.mean
        return self.step, min(self.samples, key=lambda sample: (abs(sample[1] - mean), sample[0]))[0]


@dataclass(slots=True)
class _FirstAndLastEvaluation:
    """A validation problem in its first and in its last evaluation."""

    first: _EvaluatedProblem | None = None
    last: _EvaluatedProblem | None = None

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a sample. Evaluations must be added in order."""
        step = record["step"]
        if self.first is None:
            # Use one object for both, until a second evaluation begins.
            self.first = self.last = _EvaluatedProblem(step)
        elif self.last is not None and self.last.step != step:
            self.last = _EvaluatedProblem(step)
        if self.last is not None:
            self.last.samples.append((record["line"], _reward(record), digest(_completion_texts(record))))


def changed_between(before: Path, after: Path, max_problems: int) -> list[dict[str, Any]]:
    """Return the problems with different answers in two evaluation files, in the form of `summarise_samples`."""
    problems: dict[str, _FirstAndLastEvaluation] = {}
    files = {0: before, 1: after}
    for number, path in files.items():
        for record in read_records(path, number):
            # Without a verdict, right and wrong cannot be compared.
            if record.get("answer_correct") is None:
                continue
            scored_record = {**record, "reward": float(record["answer_correct"] is True)}
            # If the data file changed, a problem's number may mean another problem. So compare the content too.
            identity = digest([record.get("prompt"), record.get("answer")]).hex()
            problems.setdefault(f"{_problem_digest(record)} {identity}", _FirstAndLastEvaluation()).add(scored_record)
    problems_in_both = {name: problem for name, problem in problems.items() if problem.first is not problem.last}
    pairs = _select_changed(problems_in_both, files, max_problems)
    for pair in pairs:
        for side in ("before", "after"):
            pair[side].pop("step", None)
    return pairs


def _select_changed(
    problems: Mapping[str, _FirstAndLastEvaluation], files: Mapping[int, Path], max_problems: int = _NUM_CHANGED
) -> list[dict[str, Any]]:
    """Return the validation problems whose mean reward changed most. At most half of them became worse."""
    pairs = [
        (problem.last.mean - problem.first.mean, problem.first, problem.last)
        for problem in problems.values()
        if problem.first
        and problem.last
        and problem.last.step != problem.first.step
        and problem.last.completions != problem.first.completions
    ]
    # The largest changes first, separately for problems that became better and worse.
    improved = sorted((pair for pair in pairs if pair[0] > 0), key=lambda pair: -pair[0])
    worsened = sorted((pair for pair in pairs if pair[0] < 0), key=lambda pair: pair[0])
    unchanged = [pair for pair in pairs if pair[0] == 0]
    # Losses get up to half of the places, or gains would hide them.
    max_worsened = max_problems // 2
    selected_pairs = [*improved[: max_problems - min(max_worsened, len(worsened))], *worsened[:max_worsened]]
    selected_pairs += unchanged[: max_problems - len(selected_pairs)]
    counts = {"gained": len(improved), "lost": len(worsened), "same": len(unchanged), "problems": len(problems)}
    # Read these texts again. Holding all texts in memory could take gigabytes.
    records = _read_records_at(
        {place for _, *pair in selected_pairs for place in (pair[0].representative, pair[1].representative)}, files
    )
    return [
        {
            "before": _compact_with_count(records[before.representative], before),
            "after": _compact_with_count(records[after.representative], after),
            "change": short_number(change),
            **counts,
        }
        for change, before, after in selected_pairs
        if before.representative in records and after.representative in records
    ]


def _compact_with_count(record: Mapping[str, Any], evaluated: _EvaluatedProblem) -> dict[str, Any]:
    count = len(evaluated.samples)
    count_and_mean = {"samples": count, "mean": short_number(evaluated.mean)} if count > 1 else {}
    return {**compact(record), **count_and_mean}


def _read_records_at(
    step_and_line_numbers: Iterable[tuple[int, int]], files: Mapping[int, Path]
) -> dict[tuple[int, int], dict[str, Any]]:
    lines_of_step: dict[int, set[int]] = {}
    for step, line in step_and_line_numbers:
        lines_of_step.setdefault(step, set()).add(line)
    return {
        (step, record["line"]): record
        for step, line_numbers in lines_of_step.items()
        for record in read_records(files[step], step)
        if record["line"] in line_numbers
    }


def _steps_to_read(files: Sequence[tuple[int, Path]]) -> list[tuple[int, Path]]:
    """Return the steps to read: evenly spread, with the first and the last. Large files make them fewer."""
    sizes = {path: path.stat().st_size for _, path in files}
    num_steps = min(STEPS_READ, len(files))
    # First and last step are always read, whatever their size.
    while num_steps > 2 and sum(sizes[path] for _, path in spread(files, num_steps)) > BYTES_READ:
        num_steps -= 1
    return spread(files, num_steps)


def _token_samples(run: RunRecord) -> list[dict[str, Any]]:
    """Return the newest steps' samples with a row per token."""
    samples: list[dict[str, Any]] = []
    for step, path in reversed(spread(run.token_files, _NUM_TOKEN_STEPS)):
        for record in read_records(path, step):
            if len(samples) == _NUM_RECORDS_WITH_TOKENS:
                return samples
            columns = record.get("columns")
            if isinstance(columns, dict):
                samples.append({**compact(record), "columns": token_columns(columns), "cut": _count(record.get("cut"))})
                # The tokens already contain the completion.
                samples[-1].pop("completion", None)
    return samples


def _problem_digest(record: Mapping[str, Any]) -> str:
    """Return a hash that identifies a record's problem, from set, source and index, or without an index from the
    prompt.
    """
    index = record.get("problem")
    prompt = record.get("prompt") if index is None else None
    return digest([record.get("set"), record.get("source"), index, prompt]).hex()


def _completion_texts(record: Mapping[str, Any]) -> Any:
    turns = [turn.get("completion") for turn in as_list(record.get("turns")) if isinstance(turn, Mapping)]
    return turns or record.get("completion")


def digest(value: Any) -> bytes:
    # Hashes replace texts in memory; 16 bytes make collisions practically impossible.
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).digest()


def _numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: record.get(name) for name in ("reward", "tokens")}


def _reward(record: Mapping[str, Any]) -> float:
    return float(record["reward"]) if is_finite_number(record.get("reward")) else 0.0


def _count(value: Any) -> int:
    return int(value) if is_finite_number(value) else 0
