"""Images of containers, made from programs of this machine."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path


def make_image(folder: Path, programs: Sequence[str]) -> None:
    """Fill `folder` with a shell, these programs and their libraries, as an unpacked image."""
    paths = [Path(found) for name in ("bash", *programs) if (found := shutil.which(name, path="/bin:/usr/bin"))]
    listed = subprocess.run(["ldd", *paths], capture_output=True, text=True, check=True).stdout
    libraries = set(re.findall(r"(/\S+) \(0x", listed))
    for source, place in [*((path, f"bin/{path.name}") for path in paths), *((name, name[1:]) for name in libraries)]:
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, folder / place)
    (folder / "bin/sh").symlink_to("bash")
    # podman and docker make missing folders; apptainer refuses an image without them.
    for name in ("dev", "proc", "sys", "etc", "tmp", "var/tmp"):
        (folder / name).mkdir(parents=True)
