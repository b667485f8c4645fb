"""The reward of the library math-verify: verdicts, gold answers, and answers that never end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from megarl.rewards.functions.math_verify import math_verify
from tests.rewards.pools import ZERO, all_scored, pool_of, summed


@pytest.mark.parametrize(
    ("said", "gold", "expected"),
    [
        (r"so \boxed{\frac{2}{4}}", "1/2", (1.0, True, True)),
        (r"$x = 1$, then $\boxed{(x+1)^2}$", "$x^2+2x+1$", (1.0, True, True)),
        ("The final answer is 1,234.", 1234, (1.0, True, True)),
        (r"\boxed{3}", "1/2", (0.0, True, False)),
        (r"\boxed{3}", ["2", "3"], (1.0, True, True)),
        ("no idea", "3", (0.0, False, False)),
        # The library itself reads a bare formula so; this reward does not correct it.
        (r"\boxed{2}", r"2\pi", (1.0, True, True)),
        (r"\boxed{2}", r"$2\pi$", (0.0, True, False)),
    ],
)
def test_verdicts_are_those_of_the_library(said: str, gold: Any, expected: tuple[float, bool, bool]) -> None:
    found = math_verify(said, gold)
    assert (found.score, found.format_valid, found.answer_correct) == expected
    assert math_verify(said, gold, correct_score=10.0).score == 10.0 * expected[0]


@pytest.mark.parametrize(
    ("gold", "words"), [("x^2+1", r"no answer in the gold answer 'x\^2\+1'"), (None, "is None"), ([], "list of texts")]
)
def test_a_gold_answer_without_a_value_is_refused(gold: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        math_verify("1", gold)


def test_the_alarms_of_the_library_stay_off() -> None:
    before = signal.getsignal(signal.SIGALRM)
    seen: list[int] = []
    signal.signal(signal.SIGALRM, lambda number, frame: seen.append(number))
    try:
        # An alarm set by the caller would be cleared by the library's own.
        signal.alarm(600)
        assert math_verify(r"\boxed{1}", "1").score == 1.0
        assert signal.alarm(0) > 0 and not seen
    finally:
        signal.signal(signal.SIGALRM, before)


async def test_an_answer_that_takes_for_ever_ends_at_the_cpu_limit() -> None:
    with pool_of("math_verify", timeout_seconds=2.0, wall_timeout_seconds=300.0) as pool:
        endless, right = await all_scored(pool, r"\boxed{2^{2^{2^{40}}} + 1}", r"\boxed{5}", answer="5")
        assert (summed(endless), endless.failure) == (ZERO, "timeout") and "CPU seconds" in endless.detail
        assert right.failure is None and right.reward.answer_correct


def test_the_check_of_records_does_not_import_the_library() -> None:
    code = (
        "import sys; from megarl.files.import_path import import_object as load; from megarl.rewards import *; "
        "load(RECORD_CHECKS['math_verify'], 'f')('1', {}); assert 'math_verify' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
