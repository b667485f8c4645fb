"""The types of package, tools and tests for GPUs, by pyright: a test, so that other tests run beside it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PASSED = Path(sys.prefix, ".types-passed")
"""Digest of what pyright has last found without errors. It is in the environment, so a fresh clone has none."""


def digest_of(root: Path) -> str:
    """Return a digest of all that pyright reads: sources, settings, libraries and the interpreter."""
    digest = hashlib.sha256(sys.version.encode())
    for name in sorted(f"{library.name} {library.version}" for library in distributions()):
        digest.update(name.encode())
    settings = root / "pyproject.toml"
    folders = tomllib.loads(settings.read_text(encoding="utf-8"))["tool"]["pyright"]["include"]
    sources = [file for folder in folders for file in (root / folder).rglob("*.py*") if file.suffix != ".pyc"]
    for file in sorted([*sources, settings]):
        digest.update(f"\0{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


# pyright takes 130 s of processor time, and took over 900 s where other programs used the machine too.
@pytest.mark.types
@pytest.mark.timeout(2400)
def test_types_hold() -> None:
    digest = digest_of(ROOT)
    if PASSED.exists() and PASSED.read_text() == digest:
        return
    # Node collects garbage of 16 MB by default. pyright 1.1.414 takes a fifth more processor time with it.
    options = f"{os.environ.get('NODE_OPTIONS', '')} --max-semi-space-size=256"
    environment = os.environ | {"NODE_OPTIONS": options.strip()}
    done = subprocess.run(["pyright"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    # Of the sources that were read: they may have changed since.
    PASSED.write_text(digest)


SETTINGS = '[tool.pyright]\ninclude = ["megarl", "tools", "tests/gpu"]\n'


@pytest.mark.parametrize("name", ["megarl/a.py", "tools/typings/b.pyi", "tests/gpu/c.py", "pyproject.toml"])
def test_a_change_is_checked_again(tmp_path: Path, name: str) -> None:
    for file in (tmp_path / "megarl/a.py", tmp_path / "tools/typings/b.pyi", tmp_path / "tests/gpu/c.py"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    before = digest_of(tmp_path)
    assert digest_of(tmp_path) == before
    (tmp_path / name).write_text(f"{SETTINGS}a = 1" if name == "pyproject.toml" else "a = 1")
    assert digest_of(tmp_path) != before


def test_tests_that_only_a_gpu_runs_are_checked() -> None:
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]["include"]
    assert {"megarl", "tools", "tests/gpu", "tests/standin_gpu"} <= {*included}
