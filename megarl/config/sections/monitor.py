"""Recipe section `monitor`: observation of a running run by other programs."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from megarl.config.annotations import OnlyIf
from megarl.config.conditions import MONITORED
from megarl.config.section import Section
from megarl.config.sections.rollout import LOOPBACK, MIN_TOKEN_CHARACTERS


class MonitorConfig(Section):
    """HTTP server of the driver for Prometheus."""

    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of the driver's HTTP server: /metrics for Prometheus, and /health. 0: any free port. Default: none, so no
    server starts. See megarl/tracking/README.md."""
    host: Annotated[str, OnlyIf(MONITORED)] = "127.0.0.1"
    """Address on which the driver's HTTP server listens. Any address except loopback requires a token."""
    token: Annotated[str | None, OnlyIf(MONITORED)] = None
    """Secret bearer token for clients of the driver's HTTP server, written as ${oc.env:NAME}. Required if `host` is not
    a loopback address, with at least 16 characters."""

    @model_validator(mode="after")
    def _require_token(self) -> Self:
        """Require a token on an address that other machines can reach."""
        if self.port is not None and self.host not in LOOPBACK and len(self.token or "") < MIN_TOKEN_CHARACTERS:
            raise PydanticCustomError(
                "monitor",
                "host is not a loopback address: monitor.token needs at least {least} characters",
                {"least": MIN_TOKEN_CHARACTERS},
            )
        return self
