"""Whether a recipe's environment can be imported, and the chat template can go on after a turn."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megarl.config import Recipe
from megarl.data.chat import load_tokenizer
from megarl.data.dialogue import Dialogue
from megarl.environments import find_environment
from megarl.types import ConfigError


def environment(recipe: Recipe, *, has_model: bool) -> Iterator[str]:
    """Faults of `rollout.environment`; `has_model` says that the model folder is complete."""
    if not recipe.has_engine:
        return
    name = recipe.rollout.environment
    try:
        find_environment(name)
    except ConfigError as error:
        yield str(error)
        return
    if name == "single_turn" or not has_model:
        return
    dialogue = Dialogue(load_tokenizer(recipe.model.path))
    try:
        dialogue.observation(np.zeros(0, np.int32), ({"role": "user", "content": "."},))
    except ValueError as error:
        yield (
            f"rollout.environment = {name!r}: {error}; give the model folder a chat template that goes on after an "
            "assistant's turn, or take single_turn"
        )
