from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megarl.files.import_path import function_of, import_object, is_import_path
from megarl.types import ConfigError

SOURCE = """
from dataclasses import dataclass


@dataclass
class Pair:
    left: int
    right: int


def add(left, right):
    return Pair(left, right).left + right


NUMBER = 3
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("package.module:function", True),
        ("module:function", True),
        ("losses.py:function", True),
        ("/some/where/my losses.py:function", True),
        ("function", False),
        ("package.module", False),
        ("package.module:", False),
        ("some/where:function", False),
        ("losses.py:not a name", False),
    ],
)
def test_the_form_of_an_import_path(name: str, expected: bool) -> None:
    assert is_import_path(name) == expected


def test_a_file_is_run_once_and_files_of_one_name_are_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(SOURCE)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/own.py").write_text("def add(left, right):\n    return 0\n")
    monkeypatch.chdir(tmp_path)
    add = import_object("own.py:add", "algorithm.policy_loss")
    assert add(2, 3) == 5
    assert import_object(f"{tmp_path}/own.py:add", "algorithm.policy_loss") is add
    assert import_object("other/own.py:add", "algorithm.policy_loss")(2, 3) == 0


def test_the_tables_own_names_come_first() -> None:
    assert function_of("low", {"low": min}, "field") is min
    assert function_of("math:hypot", {"low": min}, "field")(3, 4) == 5


@pytest.mark.parametrize(
    ("name", "told"),
    [
        pytest.param("absent.py:f", ["cannot import absent.py", "FileNotFoundError"], id="no file"),
        pytest.param(
            "no_such_package.part:f", ["cannot import no_such_package.part", "ModuleNotFound"], id="no module"
        ),
        pytest.param("own.py:addd", ["has no function 'addd'; did you mean 'add'?"], id="no function"),
        pytest.param("own.py:NUMBER", ["'NUMBER' of module own.py is not a function but int;"], id="a number"),
        pytest.param("broken.py:f", ["cannot import broken.py", "ZeroDivisionError"], id="raises"),
    ],
)
def test_what_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, told: list[str]
) -> None:
    (tmp_path / "own.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    with pytest.raises(ConfigError) as caught:
        import_object(name, "algorithm.policy_loss")
    assert str(caught.value).startswith(f"algorithm.policy_loss: {name!r}: ")
    assert all(words in str(caught.value) for words in told)
    assert not [module for module in set(sys.modules) - before if module.startswith("broken")]
