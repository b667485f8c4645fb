"""Mutants: one of each kind, where none is made, and their names."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.checks import mutations
from tools.mutation.marked_statements import mark_statements, name_at
from tools.mutation.mutants import find_mutants
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
    "return max(a, b)": [],
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


def test_equal_changes_of_equal_lines_have_keys_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("def f(a):\n    a.flush()\n    a.flush()\n", encoding="utf-8")
    first, second = (mutant.key for mutant in find_mutants(tmp_path, path))
    assert first == "module.py f: dropped line: a.flush() -> pass" and second == f"{first} (2)"


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


def test_marked_statements_note_that_they_run(tmp_path: Path) -> None:
    (tmp_path / "megarl").mkdir()
    (tmp_path / "megarl/__init__.py").touch()
    source = (
        '"""Text."""\nfrom __future__ import annotations\n\nclass A:\n    def f(self, a):\n        """Text."""\n'
        "        if a:\n            return 1\n        else:\n            a = a or 2\n        return a\n"
    )
    (tmp_path / "megarl/marked.py").write_text(source, encoding="utf-8")
    assert name_at(source, "megarl/marked.py", 10) == "megarl/marked.py A.f: a = a or 2"
    names = mark_statements(tmp_path, ["megarl/marked.py"])
    program = "from megarl.marked import A; import os; A().f(0); os._exit(0)"
    # Without the site's packages, and with a process that ends as ranks do.
    subprocess.run([sys.executable, "-S", "-c", program], cwd=tmp_path, check=True)
    reached = {name for name, byte in zip(names, (tmp_path / "reached").read_bytes(), strict=True) if byte}
    assert {name.partition(" A.f: ")[2] for name in reached} == {"if a:", "a = a or 2", "return a"}
    assert len(names) == len(set(names)) == 4


def test_a_mutant_meets_the_tests_that_reach_its_statement_cheapest_first() -> None:
    path = "megarl/algorithms/advantages.py"
    mutant = next(mutant for mutant in find_mutants(ROOT, ROOT / path) if mutant.function == "gae")
    name = name_at((ROOT / path).read_text(encoding="utf-8"), path, mutant.line)
    reaches = [
        mutations.Reach("slow", 2.0, frozenset({name, "x"})),
        mutations.Reach("unrelated", 0.1, frozenset({"x"})),
        mutations.Reach("quick", 0.5, frozenset({name})),
    ]
    assert mutations.tests_for(name, reaches) == (["quick", "slow"], 2.5)


def test_a_try_is_read_again_after_an_interruption(tmp_path: Path) -> None:
    rows = [{"change": "a", "killer": ""}, {"change": "b", "killer": "t"}, {"change": "a", "killer": "t"}]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert mutations.read_results(tmp_path) == {"a": [rows[0], rows[2]], "b": [rows[1]]}


PATH = "megarl/algorithms/kl.py"


def _kl_tries(**fields: object) -> dict[str, list[dict[str, Any]]]:
    """Return one try of each mutant of `PATH`."""
    row = {"room": "algorithms", "place": f"{PATH}:1", "kind": "constant", "killer": "", "tiers": ["fast"]}
    row["module"] = mutations.module_digest(PATH)
    return {mutant.key: [{**row, "change": mutant.key, **fields}] for mutant in find_mutants(ROOT, ROOT / PATH)}


def test_a_survivor_is_tried_again_in_a_tier_that_it_has_not_met() -> None:
    tries = [{"killer": "", "tiers": ["fast"]}]
    assert not mutations.is_wanted(tries, ["fast"], again=False)
    assert mutations.is_wanted(tries, ["fast", "slow"], again=False) and mutations.is_wanted(
        tries, ["fast"], again=True
    )
    killed = [*tries, {"killer": "test", "tiers": ["fast"]}]
    assert not mutations.is_wanted(killed, ["fast", "slow"], again=True) and mutations.is_wanted(
        [], ["fast"], again=False
    )


def test_a_result_holds_for_the_statements_of_its_module_alone() -> None:
    mutants = find_mutants(ROOT, ROOT / PATH)
    tries = _kl_tries()
    assert mutations.valid_tries(tries, mutants) == tries
    assert mutations.valid_tries(_kl_tries(module="an earlier text"), mutants) == {}
    assert list(mutations.valid_tries(tries, mutants[:1])) == [mutants[0].key]


def test_a_record_holds_for_the_statements_of_the_mutated_modules(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    tests = [{"test": "t", "seconds": 1.0, "reached": []}]
    other = "megarl/algorithms/advantages.py"
    file.write_text(json.dumps({"modules": {PATH: mutations.module_digest(PATH), other: "x"}, "tests": tests}))
    assert mutations.read_record(file, [PATH]) == tests
    assert mutations.read_record(file, [PATH, other]) is None
    assert mutations.read_record(file, ["megarl/algorithms/trial.py"]) is None
    assert mutations.read_record(tmp_path / "missing.json", [PATH]) is None


def test_the_table_counts_killed_mutants_and_fails_without_any() -> None:
    mutants = find_mutants(ROOT, ROOT / PATH)
    assert [row["met"] for row in mutations.table([], {})] == [False]
    killed = list(mutations.table(mutants, _kl_tries(killer="test")))
    assert [row["kind"] for row in killed] == [f"{len(mutants)} of {len(mutants)} killed"] * 2 and killed[-1]["met"]
    survived = list(mutations.table(mutants, _kl_tries()))
    assert len(survived) == len(mutants) + 2 and not survived[-1]["met"]


def test_the_rooms_of_the_goal_exist() -> None:
    assert all(mutations.modules_of(room) for room in mutations.ROOMS)
    assert all((ROOT / "tests" / folder).is_dir() for _, folders in mutations.ROOMS.values() for folder in folders)
    assert mutations.room_of("megarl/reshard/plan.py") == "main path"
    assert mutations.room_of("megarl/reshard/world.py") == "reshard"
