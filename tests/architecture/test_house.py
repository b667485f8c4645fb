"""Rules of the house that no linter checks."""

from __future__ import annotations

import ast
import re
import subprocess
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from megarl.config.recipe import load

ROOT = Path(__file__).resolve().parents[2]
CODE_FOLDERS = ("megarl", "tools", "checkpoints_convert")
TOP_LEVEL = {*CODE_FOLDERS, "launch", "tests", "pyproject.toml", "README.md", "LICENSE"}
MANY_LINES_OF_A_FILE = 500
MANY_LINES_OF_A_FUNCTION = 80
MOST_FILES_OF_A_FOLDER = 20
FULL_FOLDERS = {"launch/recipes"}
"""Folders that may hold more: users start recipes by these paths."""
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
FORBIDDEN_TEXT = {
    "runs code of a model folder": r"trust_remote_code\s*=\s*True|[\"']trust_remote_code[\"']\s*:\s*True",
    "unpickles a file": r"weights_only\s*=\s*False|\bpickle\.load\(",
}


@cache
def tracked() -> tuple[str, ...]:
    """Files of the repository, and new ones not yet committed."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return tuple(name for name in listing.stdout.splitlines() if (ROOT / name).is_file())


def code_files() -> list[str]:
    return [name for name in tracked() if name.endswith(".py") and name.split("/")[0] in CODE_FOLDERS]


def code_lines(text: str) -> int:
    """Lines without those of tables: a module's own dict, list or tuple literals grow with what they list."""
    tables = 0
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict | ast.List | ast.Tuple):
            tables += (node.end_lineno or node.lineno) - node.lineno
    return len(text.splitlines()) - tables


def functions(text: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_there_is_code_to_check() -> None:
    assert {"megarl/config/__init__.py", "megarl/training/training_engine.py", "tools/make_tiny_model.py"} <= set(
        code_files()
    )


def test_long_files_and_functions_are_pointed_out() -> None:
    """A long file or function is no fault: it is worth a look whether it does one job."""
    long = {name: size for name in code_files() if (size := code_lines(read(name))) > MANY_LINES_OF_A_FILE}
    long |= {
        f"{name}:{function}": size
        for name in code_files()
        for function, size in functions(read(name))
        if size > MANY_LINES_OF_A_FUNCTION
    }
    if long:
        warnings.warn(f"long, each worth a look: {long}", stacklevel=1)


def test_names_say_what_is_inside() -> None:
    words = {name: set(re.split(r"[/_.]", name)) for name in code_files()}
    assert {name: found for name, parts in words.items() if (found := parts & FORBIDDEN_NAMES)} == {}


def full_folders(names: Iterable[str]) -> dict[str, int]:
    counts = Counter(str(Path(name).parent) for name in names)
    return {folder: count for folder, count in counts.items() if count > MOST_FILES_OF_A_FOLDER}


def test_folders_can_be_surveyed() -> None:
    """A folder of more files gets subfolders, which a newcomer would guess."""
    assert full_folders(tracked()).keys() == FULL_FOLDERS


def test_a_full_folder_is_noticed() -> None:
    names = [f"a/{number}.py" for number in range(21)]
    assert full_folders(names) == {"a": 21} and full_folders([*names[1:], "a/b/0.py"]) == {}


@pytest.mark.parametrize("pattern", [pytest.param(text, id=why) for why, text in FORBIDDEN_TEXT.items()])
def test_nothing_from_a_folder_is_executed(pattern: str) -> None:
    assert [name for name in code_files() if re.search(pattern, read(name))] == []


@pytest.mark.parametrize(
    ("why", "text"),
    [
        pytest.param("runs code of a model folder", "load(x, trust_remote_code=True)", id="remote code"),
        pytest.param("runs code of a model folder", '{"trust_remote_code": True}', id="remote code in a dict"),
        pytest.param("unpickles a file", "torch.load(f, weights_only=False)", id="weights_only"),
        pytest.param("unpickles a file", "pickle.load(file)", id="pickle"),
    ],
)
def test_the_patterns_find_what_they_are_for(why: str, text: str) -> None:
    assert re.search(FORBIDDEN_TEXT[why], text)


def test_top_level_holds_only_what_was_agreed() -> None:
    entries = {name.split("/")[0] for name in tracked()}
    assert {entry for entry in entries - TOP_LEVEL if not entry.startswith(".")} == set()


@pytest.mark.parametrize("name", [name for name in tracked() if re.fullmatch(r"launch/recipes/.*\.yaml", name)])
def test_every_shipped_recipe_is_read(name: str) -> None:
    assert load(ROOT / name).name
