"""Environments of GEM (gem-llm) by name, like `game:Mastermind-v0-easy` or `rg:leg_counting`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.environments.libraries.episodes import ForeignEnvironment


class Gem(ForeignEnvironment):
    """Environment `name` of GEM, made with `config`. Its random seed combines the problem's number and `seed`.

    Each new observation is a user message. `modules` are imported first, and may register your own environments.
    `python` must be the interpreter of a virtual environment with gem-llm: the versions pinned by gem-llm and megarl
    differ, so both cannot be installed together.
    """

    library = "gem"
    package = "gem-llm"

    def __init__(
        self,
        name: str,
        *,
        config: Mapping[str, Any] | None = None,
        modules: Sequence[str] = (),
        seed: int = 0,
        **settings: Any,
    ) -> None:
        if seed < 0:
            raise ValueError(f"seed = {seed}: must be at least 0")
        child_settings = {"name": name, "config": dict(config or {}), "modules": list(modules), "seed": seed}
        super().__init__(child_settings, **settings)
