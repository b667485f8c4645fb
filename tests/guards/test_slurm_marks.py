"""Tests that start a Slurm cluster carry the mark `slurm`; no other test sees Slurm's programs."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.local_slurm import Cluster
from tests.stand_ins.hidden_slurm import PROGRAMS, path_without_slurm

TESTS = Path(__file__).resolve().parents[1]
MARKS = {"needs_slurm", "pytest.mark.slurm"}


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def names_in(node: ast.AST) -> set[str]:
    """Names that a function uses, its parameters among them: pytest's fixtures."""
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return names | {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)}


def unmarked_starters(source: str) -> list[str]:
    """Return the tests of a file that start a Slurm cluster, directly or by a fixture or function, without the mark."""
    tree = ast.parse(source)
    starters = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "tests.cluster.local_slurm"
        for alias in node.names
        if alias.name == "Cluster"
    }
    # Each pass adds the functions that use one of the pass before.
    while more := {f.name for f in functions(tree) if names_in(f) & starters} - starters:
        starters |= more
    is_marked = {f.name: any(ast.unparse(d) in MARKS for d in f.decorator_list) for f in functions(tree)}
    return [name for name, marked in is_marked.items() if name.startswith("test_") and name in starters and not marked]


def test_all_tests_that_start_a_cluster_are_marked() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py") if path != Path(__file__)}
    sources = {path: source for path, source in sources.items() if "local_slurm" in source}
    assert {path.name: unmarked_starters(source) for path, source in sources.items()} == {"test_slurm.py": []}


def test_the_guard_follows_fixtures_and_functions() -> None:
    source = (TESTS / "cluster/launchers/test_slurm.py").read_text(encoding="utf-8")
    assert "test_a_job_avoids_the_nodes_that_it_found_faulty" in unmarked_starters(source.replace("@needs_slurm\n", ""))
    starts = "from tests.cluster.local_slurm import Cluster as C\ndef start():\n    C.start()\n"
    assert unmarked_starters(f"{starts}def test_one():\n    start()\ndef test_two():\n    pass\n") == ["test_one"]


def test_slurm_is_hidden_here(tmp_path: Path) -> None:
    visible = {name for place in os.environ["PATH"].split(":") if Path(place).is_dir() for name in os.listdir(place)}
    assert not [*filter(PROGRAMS.fullmatch, visible)] and {"bash", "env"} <= visible
    assert subprocess.run(["bash", "-c", "command -v sbatch srun sinfo"]).returncode == 1
    with pytest.raises(AssertionError, match="mark the test as"):
        Cluster(tmp_path, 1)


def test_only_slurm_s_programs_are_taken_off_a_path(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for name in ("a/srun", "a/sort", "a/slurmd-wlm", "b/sort", "b/split"):
        (tmp_path / name).touch(mode=0o755)
    path = path_without_slurm(f"{tmp_path}/a:{tmp_path}/b:{tmp_path}/absent", tmp_path / "links")
    assert path == f"{tmp_path}/links/0:{tmp_path}/b:{tmp_path}/absent"
    assert os.listdir(tmp_path / "links/0") == ["sort"]
    assert shutil.which("srun", path=path) is None
