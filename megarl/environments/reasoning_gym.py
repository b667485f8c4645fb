"""Environments of reasoning-gym. Problems come from a random seed, and the task's own scorer scores answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from megarl.environments.libraries.episodes import ForeignEnvironment

Place = Literal["tags", "boxed", "text"]


class ReasoningGym(ForeignEnvironment):
    """One question of a reasoning-gym task, like `basic_arithmetic`. `config` has the task's own settings.

    The question is generated from the problem's number and `seed`. With data `environment:COUNT`, training and
    validation never share a question. `answer` names the place of the answer: in the last <answer> tags of the turn
    (tags), in its last \boxed{} (boxed), or in the whole text (text). `system` names reasoning-gym's system prompt for
    problems without one: default, simple, direct, chain_of_draft, DeepSeekZero.
    """

    library = "reasoning_gym"
    package = "reasoning-gym"

    def __init__(
        self,
        task: str,
        *,
        config: Mapping[str, Any] | None = None,
        seed: int = 0,
        answer: Place = "tags",
        system: str | None = None,
        **settings: Any,
    ) -> None:
        if answer not in get_args(Place):
            raise ValueError(f"answer = {answer!r}: must be one of {', '.join(get_args(Place))}")
        if seed < 0:
            raise ValueError(f"seed = {seed}: must be at least 0")
        child_settings = {"task": task, "config": dict(config or {}), "seed": seed, "answer": answer, "system": system}
        super().__init__(child_settings, **settings)
