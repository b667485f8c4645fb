"""Mutants: one of each kind, where none is made, and their names."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tools.checks import mutations
from tools.mutants import Mutant, find_mutants
from tools.runs import ROOT

CASES = {
    "if a < b:\n        pass": [("comparison", "<", "<=")],
    "return x is (not y)": [("comparison", "is", "is not")],
    "return a // 2": [("calculation", "//", "*"), ("off by one", "2", "3")],
    "return a and b": [("condition", "and", "or")],
    "while (a\n        and b): break": [("condition", "and", "or")],
    "if a:\n        pass": [("condition", "a", "not (a)")],
    "a.flush()": [("dropped line", "a.flush()", "pass")],
    "stream.wait_stream(b)": [("removed wait", "stream.wait_stream(b)", "pass")],
    "a += b": [("dropped line", "a += b", "pass")],
    "return f('é', b)": [("swapped arguments", "'é', b", "b, 'é'")],
    "return True": [("constant", "True", "False")],
    "return 0.5": [("constant", "0.5", "1.0")],
    "raise ValueError(a + 1)": [],
    "print(a, b)": [],
    "return f'{a + 1}' + b": [],
    "assert a < b": [],
    "return 'text'": [],
    "return zip(a, b, strict=True)": [("swapped arguments", "a, b", "b, a")],
    "return load(a, strict=True)": [("constant", "True", "False")],
}


@pytest.mark.parametrize("statement", CASES)
def test_each_place_has_its_mutants(statement: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(f'"""Text."""\nLIMIT = 3\n\ndef f(a=1):\n    """Text."""\n    {statement}\n', encoding="utf-8")
    mutants = find_mutants(tmp_path, path)
    assert [(mutant.kind, mutant.old, mutant.new) for mutant in mutants] == CASES[statement]
    for mutant in mutants:
        assert mutant.key.startswith(f"module.py f: {mutant.kind}: ") and mutant.line >= 6
        assert mutant.old in mutant.old_lines and mutant.new in mutant.new_lines
        ast.parse(mutant.apply(path.read_text(encoding="utf-8")))


def test_changes_of_one_kind_in_a_function_have_keys_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("def f(a):\n    return a[0] + a[0]\n", encoding="utf-8")
    assert [mutant.key for mutant in find_mutants(tmp_path, path) if mutant.kind == "off by one"] == [
        "module.py f: off by one: return a[0] + a[0] -> return a[1] + a[0]",
        "module.py f: off by one: return a[0] + a[0] -> return a[0] + a[1]",
    ]


def test_the_kinds_take_turns_in_a_draw_by_seed() -> None:
    packages = ["algorithms"]
    drawn = mutations.draw(packages, 14, seed=3)
    assert drawn == mutations.draw(packages, 14, seed=3) != mutations.draw(packages, 14, seed=4)
    kinds = [mutant.kind for mutant in drawn]
    assert len(set(kinds[:6])) == 6 and set(mutations.draw(packages, 10**6, seed=3)) >= set(drawn)


def test_each_mutant_without_effect_exists_and_has_a_reason() -> None:
    reasons: dict[str, str] = json.loads(mutations.WITHOUT_EFFECT.read_text(encoding="utf-8"))
    paths = {key.partition(" ")[0] for key in reasons}
    keys = {mutant.key for path in paths for mutant in find_mutants(ROOT, ROOT / path)}
    assert reasons.keys() <= keys and all(reasons.values())


def test_the_tests_that_import_a_module_run_first() -> None:
    path = "megarl/algorithms/advantages.py"
    tests = mutations.tests_of(Mutant(path, "gae", 1, "constant", 0, 0, "", "", "", ""))
    assert tests[-1] == "tests/algorithms"
    assert {"tests/algorithms/test_advantages.py", "tests/rollout/test_batch_advantages.py"} <= set(tests[:-1])
    # This test imports the module from its package.
    transport = Mutant("megarl/reshard/transport.py", "f", 1, "constant", 0, 0, "", "", "", "")
    assert "tests/reshard/checks/test_verify.py" in mutations.tests_of(transport)
