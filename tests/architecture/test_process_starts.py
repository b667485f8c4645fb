"""Few modules start or kill processes: all others use theirs.

Not counted: Ray's actors (`cluster/launchers/ray.py`, `processes/on_ray.py`), and os.exec, which replaces a program.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = {
    "megarl/platform/commands.py": "short commands, waited for",
    "megarl/processes/launcher.py": "programs in sessions of their own",
    "megarl/processes/process_tree.py": "forks, and the end of a process with its descendants",
    "megarl/sandbox/kernel.py": "the fork into namespaces, a system call that Python lacks",
}
LIBRARIES = {"subprocess", "multiprocessing", "torch.multiprocessing", "pty"}
"""Modules that start processes."""
FUNCTIONS = {
    "os": {"fork", "forkpty", "kill", "killpg", "popen", "posix_spawn", "posix_spawnp", "setsid", "system"},
    "signal": {"pidfd_send_signal"},
    "asyncio": {"create_subprocess_exec", "create_subprocess_shell", "subprocess"},
    "futures": {"ProcessPoolExecutor"},
}
"""Functions that start or kill processes, by their module."""
OWN = {"fork", "forkpty", "clone", "vfork"}
"""A module's own function of such a name is another way to fork."""


def starts(text: str) -> set[str]:
    """Return what starts or kills processes in a module: libraries, functions of libraries, and its own functions."""
    found: set[str] = set()
    tree = ast.parse(text)
    found |= OWN & {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= LIBRARIES & {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = (node.module or "").rpartition(".")[2]
            found |= LIBRARIES & {node.module}
            found |= FUNCTIONS.get(source, set()) & {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            source = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
            found |= {node.attr} & FUNCTIONS.get(source, set())
        elif isinstance(node, ast.Name):
            found |= {node.id} & {"PR_SET_PDEATHSIG", "_PR_SET_PDEATHSIG"}
    return found


def test_few_modules_start_or_kill_processes() -> None:
    files = sorted((ROOT / "megarl").rglob("*.py"))
    found = {str(path.relative_to(ROOT)): starts(path.read_text(encoding="utf-8")) for path in files}
    assert {name: what for name, what in found.items() if what and name not in MODULES} == {}
    assert [name for name in MODULES if not found[name]] == []
    assert len(MODULES) == 4


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import subprocess", {"subprocess"}),
        ("from subprocess import run", {"subprocess"}),
        ("from os import killpg", {"killpg"}),
        ("child = os.fork()", {"fork"}),
        ("def start(make=os.posix_spawn): ...", {"posix_spawn"}),
        ("await asyncio.create_subprocess_exec('true')", {"create_subprocess_exec"}),
        ("pool = concurrent.futures.ProcessPoolExecutor()", {"ProcessPoolExecutor"}),
        ("prctl(PR_SET_PDEATHSIG, 9)", {"PR_SET_PDEATHSIG"}),
        ("def clone(flags): ...", {"clone"}),
        ("process.kill()\nos.getpid()", set()),
    ],
)
def test_a_start_is_found(text: str, found: set[str]) -> None:
    assert starts(text) == found
