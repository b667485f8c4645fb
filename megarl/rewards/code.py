"""The reward for a program that passes its tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from megarl.rewards.code_cases import read_cases
from megarl.rewards.code_programs import Trial, last_block
from megarl.sandbox.remote import AnySandbox
from megarl.types import Reward

METRICS = {
    "reward/code/passed": ("share", "tests that a program passed, mean over samples"),
    "reward/code/wrong": ("share", "tests with a wrong output"),
    "reward/code/runtime_errors": ("share", "tests that ended with an error"),
    "reward/code/timeouts": ("share", "tests that took too long"),
    "reward/code/unrun": ("share", "tests that were not run, after one that failed or without a program"),
    "reward/code/judge_errors": ("share", "tests counted as wrong because the comparison itself raised"),
    "reward/code/wall_timeouts": ("share", "tests that took too long by the clock"),
    "reward/code/cpu_seconds": ("seconds", "CPU time of a sample's tests, mean"),
    "reward/code/retries": ("count", "requests to a sandbox's server that were sent again, mean over samples"),
}
"""Names, units and meanings, for `tracking.table`."""


def code(
    completion_text: str,
    answer: Any,
    record: Mapping[str, Any],
    sandbox: AnySandbox,
    *,
    correct_score: float = 1.0,
    score: Literal["all", "fraction"] = "all",
    max_tests: int | None = None,
    field: str | None = None,
) -> Reward:
    """Run the last fenced block of the completion on the tests of `code_cases`, or of a `field` of the record.

    `score`: all: `correct_score` for a program that passes all, and testing ends with the first that it fails;
    fraction: that part of it. Only the first `max_tests` count. The first that takes too long is the last that is run.
    The format is valid if there is such a block. Metrics: `passed`, `wrong`, `runtime_errors`, `timeouts`, `unrun`:
    shares of the tests, one each; `judge_errors`: those wrong where the comparison itself raised; `wall_timeouts`: the
    time-outs by the clock; `cpu_seconds` of all runs; `retries` of requests to a server.
    """
    if score not in ("all", "fraction"):
        raise ValueError(f"score is {score!r}; give all or fraction")
    if max_tests is not None and max_tests < 1:
        raise ValueError(f"max_tests is {max_tests}; give 1 at least, or leave it out for all")
    cases = read_cases(answer, record, field)[:max_tests]
    source = last_block(completion_text)
    if source is None:
        unrun = dict.fromkeys(("passed", "wrong", "runtime_errors", "timeouts"), 0.0) | {"unrun": 1.0}
        return Reward(0.0, format_valid=False, answer_correct=False, metrics=unrun)
    settings = sandbox.settings
    counts: dict[str, int] = dict.fromkeys(("passed", "wrong", "runtime_errors", "timeouts"), 0)
    seconds, retries, judge_errors, wall_timeouts = 0.0, 0, 0, 0
    for case in cases:
        left = settings.total_timeout_seconds - seconds
        if left <= 0:
            counts["timeouts"] += 1
            break
        trial = Trial(source, case, has_numpy=settings.url is not None or "numpy" in settings.packages)
        ran = sandbox.run(
            trial.program,
            trial.stdin,
            cpu_seconds=min(settings.timeout_seconds, left),
            output_bytes=trial.output_bytes,
        )
        seconds += ran.cpu_seconds
        retries += ran.retries
        wall_timeouts += ran.is_by_clock
        if ran.outcome == "ok":
            try:
                outcome = "passed" if trial.passes(ran.stdout) else "wrong"
            except Exception:  # what the policy prints must not spare it the verdict
                outcome = "wrong"
                judge_errors += 1
        else:
            outcome = {"error": "runtime_errors", "timeout": "timeouts", "output": "wrong"}[ran.outcome]
        counts[outcome] += 1
        if outcome == "timeouts" or (outcome != "passed" and score == "all"):
            break
    shares = {name: count / len(cases) for name, count in counts.items()}
    shares["unrun"] = 1 - sum(counts.values()) / len(cases)
    is_correct = counts["passed"] == len(cases)
    earned = float(is_correct) if score == "all" else shares["passed"]
    metrics = shares | {
        "judge_errors": judge_errors / len(cases),
        "wall_timeouts": wall_timeouts / len(cases),
        "cpu_seconds": seconds,
        "retries": float(retries),
    }
    return Reward(earned * correct_score, format_valid=True, answer_correct=is_correct, metrics=metrics)
