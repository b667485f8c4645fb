"""A source says its settings without a warning."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megarl.config import Recipe
from megarl.data.chat import load_tokenizer
from megarl.loops.sources import make_source


async def test_the_history_that_a_policy_is_shown_is_no_warning(tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model()
    recipe = Recipe.model_validate(
        {
            "name": "r", "loop": "rl", "model": {"path": str(folder)}, "data": {"train": "t"},
            "rollout": {"environment": "calculator", "max_turns": 3, "history": "append"},
        }
    )  # fmt: skip
    lines: list[str] = []
    warnings: list[str] = []
    screen: Any = SimpleNamespace(info=lines.append, notice=warnings.append, notice_once=None)
    rewards: Any = SimpleNamespace(score=None, metrics=dict)
    pool: Any = None

    async with AsyncExitStack() as stack:
        [given] = recipe.sources
        tokenizer = load_tokenizer(folder)
        await make_source(given, ((), {}), rewards, None, pool, tokenizer, stack, lambda: False, screen)
    assert warnings == [] and [line.partition(":")[0] for line in lines] == ["rollout.history = append"]
