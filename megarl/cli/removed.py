"""Removed commands of earlier versions. Each is an error that names its replacement."""

from __future__ import annotations

from collections.abc import Callable

import typer

from megarl.types import ConfigError

REMOVED = {
    "kubernetes": "fill launch/kubernetes/rayjob.yaml or skypilot.yaml by envsubst, see launch/container/README.md",
    "serve": "run vllm serve RUN/hf, see megarl/environments/README.md",
}
"""Replacement for each removed command."""
_ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}


def add_removed_commands(app: typer.Typer) -> None:
    for name in REMOVED:
        app.command(name, hidden=True, context_settings=_ANY_ARGUMENTS, add_help_option=False)(_make_refusal(name))


def _make_refusal(name: str) -> Callable[[], None]:
    """Return the function of a removed command: it refuses to run, and names the replacement."""

    def refuse() -> None:
        raise ConfigError(f"megarl {name}: the command was removed; {REMOVED[name]}")

    return refuse
