"""The sandbox of a recipe: where programs of the policy run, and their limits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from megarl.config.section import Section


class SandboxConfig(Section):
    require: tuple[Literal["namespaces", "landlock", "seccomp", "limits", "unprivileged"], ...] = (
        "namespaces",
        "landlock",
        "seccomp",
        "limits",
        "unprivileged",
    )
    """Layers that a machine must have to run programs (`megarl sandbox check` shows them); without one a run does not
    start. A shorter list lets programs run with less where a machine lacks the others, which a start says."""
    url: str | None = None
    """Address of a SandboxFusion server that runs programs instead, such as http://127.0.0.1:8080."""
    timeout_seconds: PositiveFloat = 4.0
    """CPU seconds of a run: a test, or a call of the Python tool."""
    wall_timeout_seconds: PositiveFloat | None = None
    """Seconds of a run by the clock, for programs that wait; left out, ten times timeout_seconds, at least 30. One that
    computes, or waits for a CPU on a busy machine, gets that time on top, up to three times as long in all."""
    total_timeout_seconds: PositiveFloat = 20.0
    """CPU seconds of all tests of a completion together, beside reward.timeout_seconds."""
    memory_mib: Annotated[int, Field(ge=64)] = 512
    """Memory of a run, beside 64 MiB for files in its /tmp."""
    output_kib: Annotated[int, Field(ge=1)] = 64
    """Standard output of a run; a test whose expected output is longer allows as much more."""
    packages: tuple[str, ...] = ("numpy",)
    """Installed packages that programs may import, beside Python's library."""
