"""Fixtures that every room's tests share."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest

from megarl.testing import RankPool

TOOLS = Path(__file__).resolve().parent.parent / "tools"


def load_tool(name: str) -> ModuleType:
    """Import `tools/NAME.py`, a script outside any package."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=3, help="how often the run of end_to_end/test_resume.py is killed")


@pytest.fixture
def num_kills(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--kills")


@pytest.fixture(scope="session")
def tool() -> Callable[[str], ModuleType]:
    """`tool("make_tiny_model")` is that script as a module."""
    return load_tool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four processes that live as long as the session; `ranks.run(function, ..., world_size=2)` uses two of them."""
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model(family="llama", num_kv_heads=4, ...)` is a model folder, made once a session for equal arguments.

    The arguments are those of `tools/make_tiny_model.py`. The folder is shared: copy it before changing it.
    """
    made: dict[tuple[tuple[str, Any], ...], Path] = {}

    def make(**arguments: Any) -> Path:
        key = tuple(sorted(arguments.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("tiny_model")
            made[key] = load_tool("make_tiny_model").make_tiny_model(folder, **arguments)
        return made[key]

    return make


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """`small_disk(options)` is a file system in memory with those mount options."""
    with contextlib.ExitStack() as stack:

        def mount(options: str) -> Path:
            folder = tmp_path / options
            folder.mkdir()
            done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True)
            if done.returncode:
                pytest.skip(f"this user may not mount a file system: {done.stderr.decode().strip()}")
            stack.callback(subprocess.run, ["umount", folder], check=True)
            return folder

        yield mount
