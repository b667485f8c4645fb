"""Settings of the processes that run an environment's attempts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from megarl.processes.server_process import ServerSettings


def process_settings(environment: str, settings: Mapping[str, Any], memory_gib: float) -> ServerSettings:
    """Return settings for processes in the current folder with this process's import paths.

    `settings` are constructor arguments of the environment, from `rollout.environment_kwargs`.
    """
    folder = os.getcwd()
    return ServerSettings(
        "megarl.environments.environment_main:start",
        environment,
        "rollout.environment",
        {"environment": environment, "settings": dict(settings)},
        # An empty entry of sys.path means the current folder, so name it explicitly.
        tuple(entry or folder for entry in sys.path),
        folder,
        int(memory_gib * (1 << 30)),
    )
