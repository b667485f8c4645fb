"""Any environment of GEM (gem-llm) by its name, such as `game:Mastermind-v0-easy` or `rg:leg_counting`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.environments.foreign import ForeignEnvironment


class Gem(ForeignEnvironment):
    """The environment `name`, made with `config`; its seed is the problem's number, and `seed` the run's.

    Its observations are messages of the user, one a turn, without the earlier ones. `modules` are imported before, and
    may register environments of your own. Its pins do not fit beside megarl's: `python` is the interpreter of a virtual
    environment that has gem-llm.
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
            raise ValueError(f"seed is {seed}; it must be 0 at least")
        told = {"name": name, "config": dict(config or {}), "modules": list(modules), "seed": seed}
        super().__init__(told, **settings)
