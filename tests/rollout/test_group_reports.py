"""Errors of attempts that a group's sampler reports to the user."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config.sections.rollout import BudgetConfig
from megarl.rollout.groups import GroupSampler
from megarl.types import Problem, SamplingSettings, Trajectory


@pytest.mark.parametrize(
    ("ended", "failure", "kinds"),
    [
        ("error", "KeyError: 'x'", ["game: KeyError"]),
        ("error", None, []),
        ("done", None, []),
        ("seconds", "Timeout: 3 s", []),
    ],
)
async def test_only_attempts_that_ended_with_an_error_are_reported(
    ended: Any, failure: str | None, kinds: list[str]
) -> None:
    reports: list[tuple[str, str]] = []
    problem = Problem(7, (), (), "")

    async def end(*arguments: object) -> Trajectory:
        return Trajectory("game", problem, 0, 0, (), None, ended=ended, failure=failure)

    unused: Any = None
    sampler = GroupSampler(
        pool=unused, dialogue=unused, score=unused, environment="game", make_environment=None, max_prompt_tokens=8,
        budget=BudgetConfig(), notify_once=lambda kind, text: reports.append((kind, text)), agent=end,
    )  # fmt: skip
    task = sampler.task(problem, 0, 0, "seed", SamplingSettings(max_new_tokens=4))
    assert (await sampler.attempt(task, unused)).ended == ended
    assert [kind for kind, _ in reports] == kinds
    assert all("at problem 7" in text and "rollout/errors/KeyError" in text for _, text in reports)
