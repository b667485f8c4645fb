"""Recipe section `sandbox`: isolated execution of programs written by the policy, and its limits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from megarl.config.annotations import OnlyIf
from megarl.config.conditions import HERE
from megarl.config.section import Section


class SandboxConfig(Section):
    """Isolation and limits of programs written by the policy."""

    require: Annotated[
        tuple[Literal["namespaces", "landlock", "seccomp", "limits", "unprivileged"], ...], OnlyIf(HERE)
    ] = (
        "namespaces",
        "landlock",
        "seccomp",
        "limits",
        "unprivileged",
    )
    """Isolation layers that the machine must support, else the run does not start (see `megarl sandbox check`). Remove
    a layer that the machine lacks: programs then run with weaker isolation, and the start reports it."""
    url: str | None = None
    """Address of a SandboxFusion server that runs the programs, for example http://127.0.0.1:8080. Default: none, this
    machine runs them."""
    timeout_seconds: PositiveFloat = 4.0
    """Maximum CPU seconds of one program run: one test, or one call of the Python tool."""
    wall_timeout_seconds: PositiveFloat | None = None
    """Maximum wall-clock seconds of one program run. Default: ten times timeout_seconds, at least 30. A
    program that still computes, or waits for a busy CPU, may run up to three times as long."""
    total_timeout_seconds: PositiveFloat = 20.0
    """Maximum CPU seconds of all tests of a completion together, in addition to reward.timeout_seconds, the limit of
    the reward function itself."""
    memory_mib: Annotated[int, Field(ge=64)] = 512
    """Memory limit of one program run in MiB. Its files in /tmp may take 64 MiB more."""
    output_kib: Annotated[int, Field(ge=1)] = 64
    """Maximum standard output of a program run in KiB. For a test with a longer expected output: twice its length plus
    4 KiB."""
    packages: Annotated[tuple[str, ...], OnlyIf(HERE)] = ("numpy",)
    """Names of installed Python packages that programs may import, in addition to the standard library."""
