"""Tasks in Harbor's format: folders with `instruction.md`, `task.toml`, `environment/` and `tests/test.sh`.

A folder of tasks is a data source. Its records have the instruction as prompt, and the task in the field `harbor`.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.types import DataError

TASK_FILE = "task.toml"
FIELD = "harbor"
"""Field of a record with its task."""
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_UNSUPPORTED = {
    "agent": ("user",),
    "verifier": ("user", "env"),
    # `memory` and `storage` are older names, with units.
    "environment": ("env", "healthcheck", "mcp_servers", "gpus", "memory", "storage"),
}
"""Unsupported settings, by section. A task that sets one is refused: without it, the graded state would be another."""
_REMEDIES = {"memory": "write memory_mb", "storage": "write storage_mb"}
"""Remedies for unsupported settings. For all others: remove the setting."""
_VERIFIER_SECONDS = 600.0
"""Time limit of a verifier in seconds: Harbor's default."""


def task_files(folder: Path) -> list[Path]:
    """Return the description file of each task in a folder, or of the folder's own task. Empty: no task."""
    if (folder / TASK_FILE).is_file():
        return [folder / TASK_FILE]
    return sorted(folder.glob(f"*/{TASK_FILE}"))


def read_task(path: Path) -> dict[str, Any]:
    """Return the record of the task with the description file `path`. Raises DataError."""
    folder = path.parent
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: is not valid TOML ({error})") from None
    instruction = folder / "instruction.md"
    if not instruction.is_file() or not (prompt := instruction.read_text(encoding="utf-8", errors="replace")).strip():
        raise DataError(f"{path}: the task has no instruction; write {instruction}")
    if not (folder / "tests/test.sh").is_file():
        raise DataError(f"{path}: the task has no verifier; write {folder}/tests/test.sh, or remove the task")
    if compose := next((name for name in _COMPOSE if (folder / "environment" / name).exists()), None):
        raise DataError(
            f"{path}: environment/{compose}: several containers for a task are not supported; remove it, "
            "or use rollout.environment=harbor"
        )
    verifier, environment = _read_section(path, settings, "verifier"), _read_section(path, settings, "environment")
    if verifier.get("environment_mode", "shared") != "shared":
        raise DataError(
            f"{path}: verifier.environment_mode = {verifier['environment_mode']!r}: the verifier runs in the agent's "
            "container; set it to shared, or use rollout.environment=harbor"
        )
    if environment.get("network_mode", "no-network") == "allowlist":
        raise DataError(f"{path}: environment.network_mode = allowlist is not supported; set it to no-network")
    # Settings that the environment could not honour are errors, not ignored.
    for section, names in _UNSUPPORTED.items():
        for name in names:
            # Programs run as the container's root anyway.
            if (value := _read_section(path, settings, section).get(name)) and value != "root":
                remedy = _REMEDIES.get(name, "remove it, or the task")
                raise DataError(f"{path}: {section}.{name} = {value!r}: is not supported; {remedy}")
    task = {
        "folder": str(folder.resolve()),
        "image": _read_text(path, environment, "docker_image"),
        "workdir": _read_text(path, environment, "workdir"),
        "has_dockerfile": (folder / "environment/Dockerfile").is_file(),
        "needs_network": environment.get("network_mode", "no-network") == "public",
        "agent_seconds": _read_positive(path, _read_section(path, settings, "agent"), "timeout_sec", None),
        "verifier_seconds": _read_positive(path, verifier, "timeout_sec", _VERIFIER_SECONDS),
        "cpus": _read_positive(path, environment, "cpus", None),
        "memory_bytes": _read_mebibytes_as_bytes(path, environment, "memory_mb"),
        "storage_bytes": _read_mebibytes_as_bytes(path, environment, "storage_mb"),
    }
    return {"prompt": prompt, "gt_answer": folder.name, FIELD: task}


def task_image(task: Mapping[str, Any], image: str | None, *, is_file: bool) -> str | None:
    """Return the image of a task's container: `image` with the task's name for {task}, else the task's image.

    `is_file`: the environment needs image files or folders. The task's image is then None, because it is a registry's
    name.
    """
    if image is not None:
        return image.replace("{task}", Path(task["folder"]).name)
    return None if is_file else task["image"]


def _read_section(path: Path, settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = settings.get(name, {})
    if not isinstance(section, dict):
        raise DataError(f"{path}: {name} = {section!r}: must be a table")
    return section


def _read_text(path: Path, section: Mapping[str, Any], name: str) -> str | None:
    value = section.get(name)
    if value is not None and not isinstance(value, str):
        raise DataError(f"{path}: environment.{name} = {value!r}: must be a text")
    return value


def _read_positive(path: Path, section: Mapping[str, Any], name: str, default: float | None) -> float | None:
    value = section.get(name, default)
    if value is None:
        return None
    # Python counts true as the integer 1.
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
        raise DataError(f"{path}: {name} = {value!r}: must be a number above 0")
    return float(value)


def _read_mebibytes_as_bytes(path: Path, section: Mapping[str, Any], name: str) -> int | None:
    mebibytes = _read_positive(path, section, name, None)
    return None if mebibytes is None else int(mebibytes * (1 << 20))
