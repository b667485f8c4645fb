"""Sources of a run: what they say at the start, and where completions end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megarl.config import Recipe
from megarl.data.chat import load_tokenizer
from megarl.loops.sources import SourceData, make_source, make_sources
from megarl.rollout.source import sampling_settings


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
        await make_source(given, SourceData((), {}), rewards, None, pool, tokenizer, stack, lambda: False, screen)
    assert warnings == [] and [line.partition(":")[0] for line in lines] == ["rollout.history = append"]


async def test_agents_of_a_mixture_share_the_memory_of_the_nodes(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_model()
    rollout = {"environment": "command", "agent": {"command": ["true"]}}
    recipe = Recipe.model_validate(
        {
            "name": "r", "loop": "rl", "model": {"path": str(folder)},
            "mixture": {name: {"data": {"train": "t"}, "rollout": rollout} for name in ("a", "b")},
        }
    )  # fmt: skip
    screen: Any = SimpleNamespace(info=list, notice=list, notice_once=None)
    rewards: Any = {source.name: SimpleNamespace(score=None, metrics=dict) for source in recipe.sources}
    data: Any = {source.name: SourceData((), {}) for source in recipe.sources}
    pool: Any = SimpleNamespace(load=None)
    async with AsyncExitStack() as stack:
        tokenizer = load_tokenizer(folder)
        sources = await make_sources(recipe, data, rewards, pool, tokenizer, stack, tmp_path, screen)
        attempts: list[Any] = [source.sampler.agent for source in sources]
        [first, second] = [attempt.__self__.runner.containers for attempt in attempts]
        # Nodes share an account only once their machine is known, so the run's memory is compared.
        assert first.nodes[0].address != second.nodes[0].address and first._memory is second._memory


async def test_completions_end_where_the_template_ends_turns(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model(), tmp_path / "model")
    # As in the folders of base models: the template's end of turn is not the model's end token.
    for name, field, end in (
        ("generation_config.json", "eos_token_id", 0), ("tokenizer_config.json", "eos_token", "<|endoftext|>"),
    ):  # fmt: skip
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, field: end}))
    recipe = Recipe.model_validate(
        {
            "name": "r", "loop": "rl", "model": {"path": str(folder)}, "data": {"train": "t", "validation": {"v": "t"}},
            "rollout": {"sampling": {"stop_token_ids": [7]}}, "evaluation": {"sampling": {"stop_token_ids": [8]}},
        }
    )  # fmt: skip
    lines: list[str] = []
    screen: Any = SimpleNamespace(info=lines.append, notice=lines.append, notice_once=None)
    rewards: Any = {source.name: SimpleNamespace(score=None, metrics=dict) for source in recipe.sources}
    data: Any = {source.name: SourceData((), {}) for source in recipe.sources}
    pool: Any = None

    async with AsyncExitStack() as stack:
        tokenizer = load_tokenizer(folder)
        [source] = await make_sources(recipe, data, rewards, pool, tokenizer, stack, tmp_path, screen)
    assert source.sampling(1).stop_token_ids == (7, 2)
    assert sampling_settings(source.recipe.evaluation_sampling).stop_token_ids == (8, 2)
    [line] = lines
    assert "ends turns with <|im_end|>, the model with <|endoftext|>" in line
