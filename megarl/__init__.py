"""megarl: reinforcement learning for large language models, Megatron-Core trainers colocated with vLLM engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.api import Run, evaluate, load_run, plan, train
    from megarl.types import ConfigError, MegarlError

    __version__: str

__all__ = ["ConfigError", "MegarlError", "Run", "__version__", "evaluate", "load_run", "plan", "train"]


def __getattr__(name: str) -> Any:
    """Import the version and the Python API at their first use."""
    # Imported at first use: `megarl --help` and the ranks need nothing of it.
    if name == "__version__":
        from importlib.metadata import version

        return version("megarl")
    if name in __all__:
        from megarl import api

        return getattr(api, name)
    raise AttributeError(f"module 'megarl' has no attribute {name!r}")


def __dir__() -> list[str]:
    # Tab completion in a terminal or notebook lists what `__getattr__` loads.
    return sorted({*globals(), *__all__})
