"""Folders that `megarl eval` writes: their answers by problem, and two of them compared problem by problem."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megarl.algorithms.evaluation import Measure, mean_with_interval, paired_difference
from megarl.files.atomic import storage_faults_named
from megarl.report.recorded import flat, json_lines
from megarl.report.samples import digest
from megarl.types import ConfigError

ANSWERS = "answers.jsonl"
"""The file that makes a folder an evaluation."""


@dataclass(slots=True)
class Answered:
    """The attempts at a problem: which are right, and a hash of its prompt and gold answer."""

    identity: bytes
    is_right: list[bool] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        """Share of right attempts."""
        return sum(self.is_right) / len(self.is_right)


Key = tuple[str, int]
"""A problem of a set: the environment that it is of, and its number."""


@dataclass(frozen=True, slots=True)
class RecordedEvaluation:
    """An evaluation as its folder has it."""

    path: Path
    name: str
    model: str
    config: Mapping[str, Any]
    """The recipe's fields by dotted name."""
    sets: Mapping[str, Mapping[Key, Answered]]
    measures: Mapping[str, Mapping[str, Measure]]
    """Measures of metrics.json by set: accuracy, pass_at_K, majority_at_K; accuracy alone where it is missing."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SetDifference:
    """A validation set in two evaluations: over the problems of both, the mean of later minus earlier accuracy."""

    name: str
    problems: int
    left_out: int
    """Problems of one evaluation alone, or with another prompt or gold answer in the other."""
    gained: int
    lost: int
    difference: Measure | None
    """None where no problem is in both."""


def is_evaluation(path: Path) -> bool:
    """Whether a folder is one that `megarl eval` writes."""
    return (path / ANSWERS).is_file()


def read_evaluation(path: Path) -> RecordedEvaluation:
    """Read the folder of an evaluation. Raises ConfigError where it has no answer, StorageError if it is unreadable."""
    sets: dict[str, dict[Key, Answered]] = {}
    notes: list[str] = []
    with storage_faults_named(path):
        for record in json_lines(path / ANSWERS):
            key = str(record.get("source") or ""), int(record.get("problem") or 0)
            identity = digest([record.get("prompt"), record.get("answer")])
            answered = sets.setdefault(str(record.get("set")), {}).setdefault(key, Answered(identity))
            answered.is_right.append(record.get("answer_correct") is True)
    if not sets:
        raise ConfigError(f"{path / ANSWERS}: has no answer; the evaluation ended before its first set was through")
    measures = {name: {"accuracy": accuracy_of(problems)} for name, problems in sets.items()}
    summary = _summary(path / "metrics.json")
    if not summary:
        notes.append(f"{path.name}: metrics.json is missing, so the evaluation ended early; sets may be missing.")
    for name, of_set in summary.get("sets", {}).items():
        measures[name] = {key: Measure(**measure) for key, measure in of_set["measures"].items()}
    return RecordedEvaluation(
        path, path.resolve().name, str(summary.get("model", "")), flat(_recipe(path)), sets, measures, tuple(notes)
    )


def accuracy_of(problems: Mapping[Key, Answered]) -> Measure:
    """Mean accuracy over problems, with its 95 % interval."""
    return mean_with_interval([answered.accuracy for answered in problems.values()])


def differences(before: RecordedEvaluation, after: RecordedEvaluation) -> list[SetDifference]:
    """Each set that both evaluations have, problem by problem; sets of the same name are the same set."""
    return [
        _difference(name, problems, after.sets[name]) for name, problems in before.sets.items() if name in after.sets
    ]


def refuse_mixed(paths: Sequence[Path]) -> None:
    """Raise ConfigError where some of the folders are evaluations and others are runs."""
    evaluations = [path for path in paths if is_evaluation(path)]
    if evaluations and len(evaluations) < len(paths):
        other = next(path for path in paths if not is_evaluation(path))
        raise ConfigError(
            f"{evaluations[0]} is an evaluation, {other} is not; give folders of evaluations alone, or of runs alone"
        )


def _difference(name: str, before: Mapping[Key, Answered], after: Mapping[Key, Answered]) -> SetDifference:
    shared = [key for key in before if key in after and before[key].identity == after[key].identity]
    changes = [after[key].accuracy - before[key].accuracy for key in shared]
    return SetDifference(
        name,
        problems=len(shared),
        left_out=len(before.keys() | after.keys()) - len(shared),
        gained=sum(change > 0 for change in changes),
        lost=sum(change < 0 for change in changes),
        difference=paired_difference(changes) if changes else None,
    )


def _summary(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _recipe(path: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load((path / "config.yaml").read_bytes())
    except (OSError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}
