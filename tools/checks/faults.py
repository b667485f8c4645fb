"""Every fault of the table tests/faults/table.py is found in time, and named; the run ends or goes on as it says.

A row for each fault: how long its detection took where a test measures it, the exit code, status.json and first cause
of the broken run, and what was left. Without a measured run the table's own values are shown in brackets; its tests
assert them. The tests run under pytest, one after another.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults.table import NUM_ROWS, ROWS, UNPROVED, Row

ROOT = Path(__file__).resolve().parents[2]
DURATION = {"small": "20 s (rows 30 and 35)", "full": "1,230 s (rows 1 to 51)"}
SMALL = {"row": [30, 35]}
# Names the marker of the tests left out elsewhere, and chooses all tests.
_ALL_TESTS = "fault_runs or long or not fault_runs"


class Outcome(NamedTuple):
    """Result of one test. `facts` are those that it recorded about the broken run, `problem` is empty if it passed."""

    problem: str
    seconds: float
    facts: Mapping[str, str]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--row", type=int, action="append", help="number of a row; may be repeated; default: all rows")
    parser.add_argument("--kills", type=int, default=2, help="number of faults in the runs of rows 1, 4, 5 and 51")


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    row_numbers = options.row or range(1, NUM_ROWS + 1)
    rows = [row for row in ROWS if row.number in row_numbers]
    proofs = dict.fromkeys(proof for row in rows for proof in row.proofs)
    outcomes, leftovers = run_tests(list(proofs), options.kills)
    for row in rows:
        yield describe(row, [(proof, outcome) for proof in row.proofs for outcome in outcomes.get(proof, [])])
    for number in sorted(set(row_numbers) - {row.number for row in rows}):
        yield {"row": number, "fault": UNPROVED.get(number, "is not in the table"), "met": False}
    if leftovers:
        yield {"row": 50, "fault": "leftovers of all tests above", "left": leftovers, "met": False}


def describe(row: Row, outcomes: Sequence[tuple[str, Outcome]]) -> dict[str, Any]:
    """Return a row of the printed table from the outcomes of its tests."""
    facts: dict[str, str] = {}
    for _, outcome in outcomes:
        facts = {**outcome.facts, **facts}
    problems = [f"{proof.rpartition('::')[2]}: {outcome.problem}" for proof, outcome in outcomes if outcome.problem]
    missing = len(set(row.proofs) - {proof for proof, _ in outcomes})
    skipped = [problem for problem in problems if ": skipped" in problem]
    is_met: bool | None = not problems and not missing
    # A machine without Slurm or Ray proves nothing, but it refutes nothing either.
    if skipped and len(skipped) == len(problems) and not missing:
        is_met = None
    seconds = float(facts["seconds"]) if "seconds" in facts else None
    return {
        "row": row.number,
        "fault": row.fault,
        "limit_s": row.seconds or "start",
        "found_s": "-" if seconds is None else seconds,
        "exit": facts.get("exit_code", f"[{row.exit_code or 'goes on'}]"),
        "status": facts.get("status", f"[{row.state or '-'}]"),
        "cause": facts.get("cause", f"[{row.cause}]"),
        "left": facts.get("left", f"[{row.left}]"),
        "tests": f"{sum(not outcome.problem for _, outcome in outcomes)} of {len(outcomes) + missing}",
        "problems": "; ".join(problems) or "-",
        "met": is_met if seconds is None or not row.seconds else is_met is not False and seconds <= row.seconds,
    }


def run_tests(proofs: Sequence[str], num_kills: int) -> tuple[dict[str, list[Outcome]], str]:
    """Run tests, given by their ids without parameters. Return their outcomes, and what they left on the machine."""
    with tempfile.TemporaryDirectory(prefix="megarl_faults_") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", _ALL_TESTS]
        done = subprocess.run(
            [*command, f"--junitxml={report}", f"--kills={num_kills}", "-o", "junit_family=xunit1", *proofs],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if not report.exists():
            raise RuntimeError(f"pytest wrote no report:\n{done.stdout}")
        outcomes: dict[str, list[Outcome]] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            proof = f"{case.get('file')}::{str(case.get('name')).partition('[')[0]}"
            outcomes.setdefault(proof, []).append(_outcome(case))
    _, _, leftovers = done.stdout.partition("this run of the tests has left:\n")
    return outcomes, leftovers.partition("\n\n")[0].strip()


def _outcome(case: ElementTree.Element) -> Outcome:
    facts = {str(fact.get("name")): str(fact.get("value")) for fact in case.iter("property")}
    problem = ""
    for kind in ("skipped", "failure", "error"):
        if (result := case.find(kind)) is not None:
            problem = f"{kind}: {str(result.get('message')).splitlines()[0][:120]}"
    return Outcome(problem, float(case.get("time", "0")), facts)
