"""Sampling of a resumed run: which programs of agents that the earlier driver started may go on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.loops.on_policy import open_rollout
from megarl.rollout.journal.journal import AttemptJournal
from megarl.tracking.run_folder import RunFolder


@pytest.mark.parametrize("has_agents", [True, False], ids=["agents", "no agents"])
def test_programs_with_an_open_attempt_are_expected_again(tmp_path: Path, has_agents: bool) -> None:
    """A program goes on if no lost weights sampled for it. Else its container is named, so that it is ended."""
    recipe = Recipe.model_validate(
        {"name": "r", "loop": "rl", "runs_folder": str(tmp_path), "model": {"path": "m"}, "data": {"train": "t"}}
    )
    unused: Any = None
    expected: list[tuple[Sequence[str], Sequence[tuple[str, str]]]] = []
    sampler = SimpleNamespace(
        agent=object() if has_agents else None,
        expect_programs=(lambda keys, containers: expected.append((keys, containers))) if has_agents else None,
    )
    source = SimpleNamespace(name="s", weight=1.0, recipe=recipe, problems=(), sampler=sampler)
    with RunFolder(recipe) as folder:
        folder.begin()
        run: Any = SimpleNamespace(
            recipe=recipe, folder=folder, data=SimpleNamespace(sources=[source]), remaining_steps=range(1, 3),
            reshard_schedule=SimpleNamespace(sleep_engines=None),
        )  # fmt: skip
        if has_agents:
            earlier = AttemptJournal(folder.journal_file, 1, unused)
            earlier.begin("attempt 0", "s").open_session("attempt 0", "its key", "node", "its container")
            earlier.close()

        async def open_and_close() -> None:
            async with open_rollout(run):
                pass

        asyncio.run(open_and_close())
    assert expected == ([(["its key"], [])] if has_agents else [])
