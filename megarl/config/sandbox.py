"""Recipe section `sandbox`: isolated execution of the policy's programs, and its limits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from megarl.config.annotations import Foreign, OnlyIf
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
    """Isolation layers required to run programs (see `megarl sandbox check`). A run does not start without them. Remove
    a layer if the machine lacks it; the start then reports the weaker isolation."""
    url: Annotated[str | None,
        Foreign("sandbox_fusion.url sandbox_fusion_url sandbox_url",
            remark="a SandboxFusion server; ColossalRL's own verifier is not asked",
            example="reward.functions=[code] sandbox.url=http://127.0.0.1:8080", short="cv",
            ColossalRL="--code-verifier-api-url")] = None  # fmt: skip
    """Address of a SandboxFusion server to run the programs instead, for example http://127.0.0.1:8080."""
    timeout_seconds: PositiveFloat = 4.0
    """CPU seconds of one run: a test, or a call of the Python tool."""
    wall_timeout_seconds: PositiveFloat | None = None
    """Wall-clock seconds of one run, for waiting programs. Default: ten times timeout_seconds, at least 30. Time spent
    computing, or waiting for a busy CPU, is added, up to three times as long in all."""
    total_timeout_seconds: PositiveFloat = 20.0
    """CPU seconds of all tests of a completion together, in addition to reward.timeout_seconds."""
    memory_mib: Annotated[int, Field(ge=64), Foreign("sandbox_fusion.memory_limit_mb")] = 512
    """Memory of one run in MiB, in addition to 64 MiB for files in its /tmp."""
    output_kib: Annotated[int, Field(ge=1)] = 64
    """Limit of a run's standard output in KiB. For a test with a long expected output: 4 KiB
    plus twice its length, if more."""
    packages: Annotated[tuple[str, ...], OnlyIf(HERE)] = ("numpy",)
    """Installed packages available to programs, in addition to Python's standard library."""
