"""Result folders of `megarl eval`: reads their answers by problem, and compares two evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from megarl.algorithms.estimates import Measure, mean_score, mean_with_interval, paired_difference
from megarl.files.atomic import raise_storage_errors
from megarl.files.plain_yaml import flatten_sections
from megarl.files.record_files import json_lines, mapping_or_empty, object_or_empty
from megarl.files.strict_json import MEDIUM
from megarl.report.samples import digest
from megarl.tracking.run_record import whole_number
from megarl.types import ConfigError

ANSWERS = "answers.jsonl"
"""File that marks a folder as an evaluation."""


@dataclass(slots=True)
class Answered:
    """All attempts at one problem: whether each is right, its reward, and a hash of prompt and gold answer."""

    identity: bytes
    is_right: list[bool] = field(default_factory=list)
    is_judged: bool = True
    """Whether every attempt has a verdict. False: the accuracy is unknown."""
    rewards: list[float] = field(default_factory=list)
    """Rewards of the scored attempts."""

    @property
    def accuracy(self) -> float:
        return sum(self.is_right) / len(self.is_right)


Key = tuple[str, int]
"""A problem of a validation set: the name of its environment, and its number."""


@dataclass(frozen=True, slots=True)
class RecordedEvaluation:
    path: Path
    name: str
    model: str
    config: Mapping[str, Any]
    """Recipe fields by dotted name."""
    sets: Mapping[str, Mapping[Key, Answered]]
    measures: Mapping[str, Mapping[str, Measure]]
    """Measures in metrics.json by validation set. Without this file: accuracy and reward/mean only."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SetDifference:
    """Comparison of a validation set in two evaluations, over their common problems: later minus earlier."""

    name: str
    measure: Literal["accuracy", "reward/mean"]
    """Compared measure: the reward if some attempt has no verdict, else the accuracy."""
    problems: int
    left_out: int
    """Number of problems in only one evaluation, or with a changed prompt or gold answer."""
    gained: int
    lost: int
    """`gained` and `lost` are the numbers of problems with a better and a worse measure in the later evaluation."""
    difference: Measure | None
    """Mean difference. None: no problem was measured in both evaluations."""


def is_evaluation(path: Path) -> bool:
    return (path / ANSWERS).is_file()


def read_evaluation(path: Path) -> RecordedEvaluation:
    """Read an evaluation folder. Raises ConfigError if it has no answers, StorageError if it is unreadable."""
    notes: list[str] = []
    with raise_storage_errors(path):
        sets = _read_answers(path / ANSWERS)
    if not sets:
        raise ConfigError(
            f"{path / ANSWERS}: the evaluation has no answers, because it ended before its first validation set was "
            "complete; run `megarl eval` again"
        )
    # Measures in metrics.json replace those computed from the answers: they have more kinds, such as pass@k.
    measures = {name: _measures_of(problems) for name, problems in sets.items()}
    summary = object_or_empty(path / "metrics.json", MEDIUM)
    # metrics.json is written last. An interrupted evaluation has none.
    if not summary:
        notes.append(f"{path.name}: metrics.json is missing, so the evaluation ended early; sets may be missing.")
    try:
        for name, set_summary in summary.get("sets", {}).items():
            measures[name] = {key: _read_measure(measure) for key, measure in set_summary["measures"].items()}
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        notes.append(f"{path.name}: metrics.json is damaged; measures are computed from the answers.")
    return RecordedEvaluation(
        path,
        path.resolve().name,
        str(summary.get("model", "")),
        flatten_sections(mapping_or_empty(path / "config.yaml")),
        sets,
        measures,
        tuple(notes),
    )


def _read_answers(file: Path) -> dict[str, dict[Key, Answered]]:
    """Return the answered problems by validation set, then by (source, problem number)."""
    sets: dict[str, dict[Key, Answered]] = {}
    for record in json_lines(file):
        key = str(record.get("source") or ""), whole_number(record.get("problem"))
        # A problem's number changes with the data file, so compare the content.
        identity = digest([record.get("prompt"), record.get("answer")])
        answered = sets.setdefault(str(record.get("set")), {}).setdefault(key, Answered(identity))
        answered.is_right.append(record.get("answer_correct") is True)
        answered.is_judged &= record.get("answer_correct") is not None
        if isinstance(reward := record.get("reward"), int | float):
            answered.rewards.append(float(reward))
    return sets


def accuracy_of(problems: Mapping[Key, Answered]) -> Measure:
    return mean_with_interval([answered.accuracy for answered in problems.values()])


def _measures_of(problems: Mapping[Key, Answered]) -> dict[str, Measure]:
    measures = {"accuracy": accuracy_of(problems)} if is_judged(problems) else {}
    rewards = [fmean(answered.rewards) for answered in problems.values() if answered.rewards]
    return measures | ({"reward/mean": mean_score(rewards)} if rewards else {})


def is_judged(problems: Mapping[Key, Answered]) -> bool:
    return all(answered.is_judged for answered in problems.values())


def differences(before: RecordedEvaluation, after: RecordedEvaluation) -> list[SetDifference]:
    return [
        _compare_set(name, problems, after.sets[name]) for name, problems in before.sets.items() if name in after.sets
    ]


def refuse_mixed_folders(paths: Sequence[Path]) -> None:
    evaluations = [path for path in paths if is_evaluation(path)]
    if evaluations and len(evaluations) < len(paths):
        mismatch = next(path for path in paths if not is_evaluation(path))
        raise ConfigError(
            f"{evaluations[0]} is an evaluation, but {mismatch} is not; give only folders of evaluations, or only "
            "folders of runs"
        )


def _compare_set(name: str, before: Mapping[Key, Answered], after: Mapping[Key, Answered]) -> SetDifference:
    """Compare two models on one set: in accuracy if both were judged, otherwise in mean reward."""
    # Pairs exclude the variance between problems, so the interval is narrower.
    shared_keys = [key for key in before if key in after and before[key].identity == after[key].identity]
    if is_judged(before) and is_judged(after):
        measure = "accuracy"
        changes = [after[key].accuracy - before[key].accuracy for key in shared_keys]
    else:
        measure = "reward/mean"
        scored_keys = [key for key in shared_keys if before[key].rewards and after[key].rewards]
        changes = [fmean(after[key].rewards) - fmean(before[key].rewards) for key in scored_keys]
    compute_mean = paired_difference if measure == "accuracy" else mean_score
    return SetDifference(
        name,
        measure,
        problems=len(shared_keys),
        left_out=len(before.keys() | after.keys()) - len(shared_keys),
        gained=sum(change > 0 for change in changes),
        lost=sum(change < 0 for change in changes),
        difference=compute_mean(changes) if changes else None,
    )


def _read_measure(fields: Mapping[str, Any]) -> Measure:
    measure = Measure(**fields)
    return Measure(float(measure.value), float(measure.low), float(measure.high), measure.interval)
