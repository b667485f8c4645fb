"""Reward for a program that passes its tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from megarl.rewards.functions.code_cases import read_cases
from megarl.rewards.functions.code_programs import Trial, last_block, long_integers
from megarl.rewards.functions.final_answers import final_text
from megarl.sandbox.sandbox_fusion import AnySandbox
from megarl.tracking.metric_rows import PER_SAMPLE, MetricRow
from megarl.types import Reward

METRICS = (
    MetricRow("reward/code/passed", "share", "passed tests", PER_SAMPLE),
    MetricRow("reward/code/wrong", "share", "tests with a wrong output"),
    MetricRow("reward/code/runtime_errors", "share", "tests that ended with an error"),
    MetricRow("reward/code/timeouts", "share", "tests that took too long"),
    MetricRow("reward/code/unrun", "share", "tests not run, after a failed one or without a program"),
    MetricRow("reward/code/judge_errors", "share", "tests counted as wrong because the comparison raised an error"),
    MetricRow("reward/code/wall_timeouts", "share", "tests exceeding the wall-clock limit"),
    MetricRow("reward/code/cpu_seconds", "seconds", "CPU time of a sample's tests, mean"),
    MetricRow("reward/code/retries", "count", "retried requests to a sandbox's server", PER_SAMPLE),
)


@long_integers()
def code(
    completion_text: str,
    answer: Any,
    record: Mapping[str, Any],
    sandbox: AnySandbox,
    *,
    in_thoughts: bool = False,
    correct_score: float = 1.0,
    score: Literal["all", "fraction"] = "all",
    max_tests: int | None = None,
    field: str | None = None,
) -> Reward:
    """Run the last fenced code block of the completion on the record's tests.

    The tests are in the record's `field`, or in the fields of `code_cases.read_cases`. Only the first `max_tests` are
    run. With `score` all, passing all tests gives `correct_score`, and testing stops at the first failure. With `score`
    fraction, the score is the passed share times `correct_score`. Testing also stops at the first timeout. The format
    is valid if a closed code block exists. A block inside thoughts does not count.

    Metrics are shares of the tests: `passed`, `wrong`, `runtime_errors`, `timeouts`, `unrun`; `judge_errors`: wrong
    because the comparison raised an error; `wall_timeouts`: timeouts of wall-clock time. `cpu_seconds` sums all runs,
    `retries` counts repeated requests to a sandbox server.
    """
    if score not in ("all", "fraction"):
        raise ValueError(f"kwargs.score = {score!r}: is not a valid value; set it to all or fraction")
    if max_tests is not None and (type(max_tests) is not int or max_tests < 1):
        raise ValueError(
            f"kwargs.max_tests = {max_tests}: is not a number of tests; set it to 1 or more, or remove it to run all"
        )
    cases = read_cases(answer, record, field)[:max_tests]
    source = last_block(final_text(completion_text, in_thoughts=in_thoughts))
    if source is None:
        nothing_run = dict.fromkeys(("passed", "wrong", "runtime_errors", "timeouts"), 0.0) | {"unrun": 1.0}
        return Reward(0.0, format_valid=False, answer_correct=False, metrics=nothing_run)
    settings = sandbox.settings
    counts: dict[str, int] = dict.fromkeys(("passed", "wrong", "runtime_errors", "timeouts"), 0)
    seconds, retries, judge_errors, wall_timeouts = 0.0, 0, 0, 0
    for case in cases:
        # All tests share a CPU budget. A test without budget left counts as a timeout.
        remaining_seconds = settings.total_timeout_seconds - seconds
        if remaining_seconds <= 0:
            counts["timeouts"] += 1
            break
        # A remote sandbox is assumed to have numpy. A local one has only the packages of its settings.
        trial = Trial(source, case, has_numpy=settings.url is not None or "numpy" in settings.packages)
        program_run = sandbox.run(
            trial.program,
            trial.stdin,
            cpu_seconds=min(settings.timeout_seconds, remaining_seconds),
            output_bytes=trial.output_bytes,
        )
        seconds += program_run.cpu_seconds
        retries += program_run.retries
        wall_timeouts += program_run.is_wall_clock_timeout
        if program_run.outcome == "ok":
            try:
                outcome = "passed" if trial.passes(program_run.stdout) else "wrong"
            except Exception:  # An output that breaks the comparison counts as wrong.
                outcome = "wrong"
                judge_errors += 1
        else:
            outcome = {"error": "runtime_errors", "timeout": "timeouts", "output": "wrong"}[program_run.outcome]
        counts[outcome] += 1
        # After a timeout further tests would probably time out too, at full cost.
        if outcome == "timeouts" or (outcome != "passed" and score == "all"):
            break
    # Tests that were not run count in the total: stopping early must not improve a share.
    shares = {name: count / len(cases) for name, count in counts.items()}
    shares["unrun"] = 1 - sum(counts.values()) / len(cases)
    is_correct = counts["passed"] == len(cases)
    share = float(is_correct) if score == "all" else shares["passed"]
    metrics = shares | {
        "judge_errors": judge_errors / len(cases),
        "wall_timeouts": wall_timeouts / len(cases),
        "cpu_seconds": seconds,
        "retries": float(retries),
    }
    return Reward(share * correct_score, format_valid=True, answer_correct=is_correct, metrics=metrics)
