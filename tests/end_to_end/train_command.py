"""The command that trains, as a process of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.forked_command import MEGARL


def train(folder: Path, *arguments: str) -> str:
    """Run `megarl train ARGUMENTS` in a folder to its good end. Returns what it printed on standard output."""
    command = [*MEGARL, "train", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
