"""A sound recipe, to be changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.preflight import check
from megarl.types import ConfigError
from tests.preflight.records import RECORD


@pytest.fixture
def recipe(tmp_path: Path, tiny_model: Callable[..., Path]) -> Callable[..., Recipe]:
    """`recipe(trainer={"tp": 2}, ...)`: a sound recipe for a small model, with sections changed."""
    model = tiny_model(num_heads=4, num_kv_heads=2, hidden_size=64, head_dim=32, intermediate_size=96, num_layers=6)
    train = tmp_path / "train.jsonl"
    train.write_text(f"{json.dumps(RECORD)}\n" * 3)

    def make(**changed: Any) -> Recipe:
        sections: dict[str, Any] = {
            "name": "small",
            "loop": "rl",
            "model": {"path": str(model)},
            "data": {"train": str(train), "max_prompt_tokens": 40},
            "rollout": {"sampling": {"max_new_tokens": 24}},
        }
        for name, value in changed.items():
            merge = isinstance(value, Mapping) and name in sections
            sections[name] = sections[name] | value if merge else value
        return Recipe.model_validate(sections)

    return make


@pytest.fixture
def only_fault(recipe: Callable[..., Recipe]) -> Callable[..., str]:
    """`only_fault(trainer={"tp": 3}, ...)`: the one line of what is wrong with the recipe that is so changed."""

    def find(**changed: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            check(recipe(**changed))
        title, *lines = str(caught.value).splitlines()
        assert caught.value.exit_code == 2
        assert title == "recipe small: 1 error" and len(lines) == 1, caught.value
        return lines[0].strip()

    return find
