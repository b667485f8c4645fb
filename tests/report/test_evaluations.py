"""Folders of evaluations: read, compared problem by problem, shown on a page and in the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.algorithms.estimates import paired_difference
from megarl.cli import main
from megarl.report.evaluations import differences, read_evaluation
from megarl.report.page import write_report
from megarl.types import ConfigError
from tests.report.made_runs import lines, make_evaluation, make_run
from tests.report.test_browse import shown
from tests.report.test_page import content


def test_two_evaluations_are_compared_problem_by_problem(tmp_path: Path) -> None:
    before = make_evaluation(tmp_path / "before", [[False], [True], [False], [True], [False], [True]])
    after = make_evaluation(tmp_path / "after", [[True], [True], [True], [False], [False]])
    path = after / "answers.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    lines(path, [*records[:-1], {**records[-1], "prompt": [{"role": "user", "content": "another"}]}])
    [found] = differences(read_evaluation(before), read_evaluation(after))
    assert (found.name, found.problems, found.gained, found.lost) == ("math", 4, 2, 1)
    assert found.left_out == 2  # one is missing there, one has another prompt
    assert found.difference is not None and found.difference.value == 0.25
    page, _, _ = write_report([before, after], tmp_path / "page.html")
    shown = content(page)
    assert [one["sets"][0]["measures"]["accuracy"]["value"] for one in shown["evaluations"]] == [0.5, 0.6]
    [comparison] = shown["comparisons"]
    assert comparison["sets"][0]["difference"]["value"] == 0.25
    assert [pair["change"] for pair in comparison["changed"]] == [1, 1, -1]
    assert comparison["changed"][0]["before"]["completion"] == "It is 99."


def test_answers_without_a_verdict_are_neither_right_nor_wrong(tmp_path: Path) -> None:
    before = make_evaluation(tmp_path / "before", [[True], [True], [False]])
    after = make_evaluation(tmp_path / "after", [[True], [False], [False]])
    for name, keeps in (("answers.jsonl", True), ("metrics.json", False)):
        path = after / name
        if not keeps:
            path.unlink(missing_ok=True)
            continue
        lines(path, [json.loads(line) | {"answer_correct": None} for line in path.read_text().splitlines()])
    [found] = differences(read_evaluation(before), read_evaluation(after))
    assert found.difference is not None and found.difference.value == pytest.approx(-1 / 3)
    assert (found.measure, found.gained, found.lost) == ("reward/mean", 0, 1)
    assert read_evaluation(after).measures["math"].keys() == {"reward/mean"}
    page, _, _ = write_report([before, after], tmp_path / "page.html")
    [comparison] = content(page)["comparisons"]
    assert comparison["changed"] == [] and comparison["sets"][0]["measure"] == "reward/mean"


def test_means_over_attempts_are_compared(tmp_path: Path) -> None:
    before = make_evaluation(tmp_path / "before", [[False, True]] * 6 + [[False, False]] * 6)
    after = make_evaluation(tmp_path / "after", [[True, True]] * 6 + [[False, True]] * 6)
    [found] = differences(read_evaluation(before), read_evaluation(after))
    assert found.difference is not None and found.difference[:3] == (0.5, 0.5, 0.5)
    assert found.difference.interval == "bootstrap"


def test_the_interval_of_a_paired_difference() -> None:
    # Agresti and Min by hand: 10 gained, 2 lost of 40: 8 / 42 +- 1.96 * sqrt(13 - 64 / 42) / 42.
    found = paired_difference([1.0] * 10 + [-1.0] * 2 + [0.0] * 28)
    assert found.value == 0.2 and found.interval == "agresti_min"
    assert (found.low, found.high) == pytest.approx((0.032388, 0.348564), abs=2e-6)
    same = paired_difference([0.0] * 50)
    assert same.value == 0 and same.low == -same.high < 0
    with pytest.raises(ValueError, match="no problem"):
        paired_difference([])


def test_the_command_prints_accuracies_and_the_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = make_evaluation(tmp_path / "before", [[False]] * 30)
    after = make_evaluation(tmp_path / "after", [[True]] * 25 + [[False]] * 5)
    with pytest.raises(SystemExit):
        main(["report", str(before), str(after), "--out", str(tmp_path / "page.html")])
    first, second, written = capsys.readouterr().out.splitlines()
    assert first.startswith("before: math accuracy 0.0 (")
    assert second.startswith("after: math accuracy 83.3 (") and "; +83.3 (+" in second
    assert second.endswith("points on 30 problems of both, 25 gained, 0 lost") and "page.html" in written


def test_runs_and_evaluations_are_not_mixed(tmp_path: Path) -> None:
    evaluation, run = make_evaluation(tmp_path / "one", [[True]]), make_run(tmp_path / "run", steps=2)
    with pytest.raises(ConfigError, match=r"one is an evaluation, .*run is not"):
        write_report([run, evaluation])
    (evaluation / "answers.jsonl").write_text("")
    with pytest.raises(ConfigError, match="has no answer"):
        write_report([evaluation])


def test_an_evaluation_s_answers_are_read(tmp_path: Path) -> None:
    evaluation = make_evaluation(tmp_path / "one", [[True], [False]])
    text = shown(evaluation)
    assert text.startswith("line 1  math  single_turn  reward 1  right  final answer 0  5 tokens")
    assert "prompt, as the policy was shown it\n<|im_start|>user\nCalculate 0 + 0.<|im_end|>" in text
    assert "final answer 99" in shown(evaluation, order="worst", limit=1)
    assert "step" not in shown(evaluation, "n")
    with pytest.raises(ConfigError, match="is an evaluation, which has no steps"):
        shown(evaluation, step=3)


def test_evaluations_are_drawn_in_a_browser(tmp_path: Path, opened: Callable[[Path], str]) -> None:
    before = make_evaluation(tmp_path / "before", [[False]] * 20)
    after = make_evaluation(tmp_path / "after", [[True]] * 18 + [[False]] * 2, temperature=0.5)
    found = opened(write_report([before, after], tmp_path / "page.html")[0])
    assert "Of 20 problems 18 gained, 0 lost" in found and "show 10 more" in found and ">better<" in found
    single = opened(write_report([after])[0])
    assert "The first of each kind" in single and 'aria-label="show"' in single
