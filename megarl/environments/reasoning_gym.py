"""Any task of reasoning-gym: problems made from numbers, answers scored by the task's own scorer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from megarl.environments.foreign import ForeignEnvironment

Place = Literal["tags", "boxed", "text"]


class ReasoningGym(ForeignEnvironment):
    """Problem of a task, such as `basic_arithmetic`. `config` has the task's own settings.

    A problem is a function of its number and of `seed`. With data `environment:COUNT` a question is used either for
    training or for validation. `answer` names the place of the answer: the last <answer> tags of the turn (tags), its
    last \\boxed{} (boxed), or the whole text (text). `system` names a system prompt of reasoning-gym for problems
    without one: default, simple, direct, chain_of_draft, DeepSeekZero.
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
            raise ValueError(f"answer is {answer!r}; it must be one of {', '.join(get_args(Place))}")
        if seed < 0:
            raise ValueError(f"seed is {seed}; it must be 0 at least")
        told = {"task": task, "config": dict(config or {}), "seed": seed, "answer": answer, "system": system}
        super().__init__(told, **settings)
