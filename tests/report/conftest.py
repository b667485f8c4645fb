"""A browser for pages."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[Path], str]:
    """`opened(page)`: the page's HTML after its scripts have run in Chromium, without errors of theirs."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium, to open a report in it (apt-get install chromium)")
    settings = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1280,3000"]
    settings += [f"--user-data-dir={tmp_path / 'chromium'}", "--virtual-time-budget=1500", "--dump-dom"]

    def dump(page: Path) -> str:
        command = [CHROMIUM, *settings, page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, encoding="utf-8")
        assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
        assert "data-error" not in done.stdout
        return done.stdout

    return dump
