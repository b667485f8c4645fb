"""One type for the results of all checks, and the line that it is printed as."""

from __future__ import annotations

import pytest

from megarl.findings import Finding, finding_of_line
from megarl.preflight.registry import finding_of
from megarl.types import ConfigError, DataError


@pytest.mark.parametrize(
    ("finding", "line"),
    [
        (
            Finding("bad", "node a", "its clock is +90 s off", "synchronise it"),
            "node a: its clock is +90 s off; synchronise it",
        ),
        (Finding("good", "torch", "2.13.0"), "torch: 2.13.0"),
        (Finding("bad", "", "nodes differ", "use nodes of one kind"), "nodes differ; use nodes of one kind"),
    ],
)
def test_a_finding_is_one_line(finding: Finding, line: str) -> None:
    assert str(finding) == line


@pytest.mark.parametrize("line", ["trainer.tp = 3: does not divide 4; set trainer.tp=2", "no place", "a: b: c", ""])
def test_a_line_is_kept(line: str) -> None:
    assert str(finding_of_line("bad", line)) == line


def test_a_check_says_whose_error_it_is() -> None:
    of_recipe, of_file = finding_of("trainer.tp = 3: is odd"), finding_of(DataError("train.jsonl: is empty"))
    assert (of_recipe.place, of_recipe.exit_code) == ("trainer.tp = 3", ConfigError.exit_code)
    assert (of_file.place, of_file.text, of_file.exit_code) == ("train.jsonl", "is empty", DataError.exit_code)
