"""Content of an HTML page about evaluations: accuracies, paired differences, changed answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.algorithms.estimates import Measure
from megarl.report.evaluations import ANSWERS, RecordedEvaluation, SetDifference, differences
from megarl.report.labels import now_text
from megarl.report.sample_text import compact, shortened_text
from megarl.report.samples import changed_between, read_records

_NUM_CHANGED = 60
"""Maximum number of changed answers shown per comparison."""
_NUM_ANSWERS = 40
"""Maximum number of right answers, and of wrong ones, shown for a single evaluation."""


def evaluation_content(evaluations: Sequence[RecordedEvaluation], labels: Sequence[str]) -> dict[str, Any]:
    """Return the page's content as JSON values. The first evaluation is compared with each later one."""
    first_evaluation, *later_evaluations = evaluations
    content = {
        "made": now_text(),
        "evaluations": [
            _evaluation_json(evaluation, label) for evaluation, label in zip(evaluations, labels, strict=True)
        ],
        "comparisons": [
            {
                "other": number,
                "sets": [_difference_json(difference) for difference in differences(first_evaluation, evaluation)],
                "changed": changed_between(first_evaluation.path / ANSWERS, evaluation.path / ANSWERS, _NUM_CHANGED),
            }
            for number, evaluation in enumerate(later_evaluations, 1)
        ],
    }
    return content if later_evaluations else {**content, "answers": _select_answers(first_evaluation.path / ANSWERS)}


def _evaluation_json(evaluation: RecordedEvaluation, label: str) -> dict[str, Any]:
    return {
        "label": shortened_text(label, 120),
        "path": shortened_text(str(evaluation.path.resolve()), 400),
        "model": shortened_text(evaluation.model, 400),
        "notes": list(evaluation.notes),
        "sets": [
            {
                "set": shortened_text(name, 120),
                "problems": len(evaluation.sets.get(name, ())),
                "measures": {shortened_text(key, 80): _measure_json(measure) for key, measure in measures.items()},
            }
            for name, measures in evaluation.measures.items()
        ],
    }


def _difference_json(difference: SetDifference) -> dict[str, Any]:
    return {
        "set": shortened_text(difference.name, 120),
        "measure": difference.measure,
        "problems": difference.problems,
        "left_out": difference.left_out,
        "gained": difference.gained,
        "lost": difference.lost,
        "difference": None if difference.difference is None else _measure_json(difference.difference),
    }


def _measure_json(measure: Measure) -> dict[str, Any]:
    return {"value": measure.value, "low": measure.low, "high": measure.high}


def _select_answers(path: Path) -> dict[str, Any]:
    """Return the first `_NUM_ANSWERS` wrong and right answers of a file."""
    answers: dict[str, list[dict[str, Any]]] = {"wrong": [], "right": []}
    for record in read_records(path, 0):
        verdict = record.get("answer_correct")
        # An answer without a verdict is neither right nor wrong.
        if verdict is None:
            continue
        chosen_answers = answers["right" if verdict is True else "wrong"]
        if len(chosen_answers) < _NUM_ANSWERS:
            # An evaluation has no steps. Drop the step passed to `read_records`.
            chosen_answers.append({name: value for name, value in compact(record).items() if name != "step"})
        # Stop early: answer files may have gigabytes.
        if all(len(kind_answers) == _NUM_ANSWERS for kind_answers in answers.values()):
            break
    return answers
