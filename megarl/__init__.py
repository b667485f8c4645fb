"""megarl: reinforcement learning for large language models, Megatron-Core trainers colocated with vLLM engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.api import Run, evaluate, load_run, plan, train

__all__ = ["Run", "evaluate", "load_run", "plan", "train"]


def __getattr__(name: str) -> Any:
    # Imported at first use: `megarl --help` and the ranks need nothing of it.
    if name in __all__:
        from megarl import api

        return getattr(api, name)
    raise AttributeError(f"module 'megarl' has no attribute {name!r}")
