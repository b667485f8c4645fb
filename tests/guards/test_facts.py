"""The facts that megarl relies on are in the sources of the installed libraries.

The sources are parsed, never imported. MEGARL_GPU_SITE names the site-packages of the CUDA environment (or a folder of
its unpacked wheels); without it those of this environment are read, whose Python sources are the same, and what only
the CUDA environment has is left out.
"""

from __future__ import annotations

import ast
import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.guards import batch_invariance
from tests.guards.facts import SIGNATURES, SOURCES, VERSIONS, Signature, Source

DISTRIBUTIONS = {"megatron": "megatron_core", "vllm": "vllm(_cpu)?", "flashinfer": "flashinfer_python"}
ONLY_CUDA = ("transformer_engine", "flashinfer")


@cache
def folder_of(library: str) -> Path | None:
    if site := os.environ.get("MEGARL_GPU_SITE"):
        return Path(site) / library
    spec = find_spec(library)
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))) if places else None


def source_of(library: str, file: str) -> str:
    folder = folder_of(library)
    if folder is None or not folder.is_dir():
        assert library in ONLY_CUDA, f"{library} is not installed"
        pytest.skip(f"{library} is in the CUDA environment alone: set MEGARL_GPU_SITE to its site-packages")
    assert (folder / file).is_file(), f"{library} has no {file} any more"
    return (folder / file).read_text(encoding="utf-8")


def node_of(source: str, scope: str) -> ast.AST:
    """The module, or the class or function that a dotted name names; the last of overloads."""
    node: ast.AST = ast.parse(source)
    for name in filter(None, scope.split(".")):
        kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        found = [child for child in ast.walk(node) if isinstance(child, kinds) and child.name == name]
        assert found, f"{scope} is gone"
        node = found[-1]
    return node


def parameters_of(node: ast.AST) -> set[str]:
    """A function's, or of a dataclass its fields'."""
    if isinstance(node, ast.ClassDef):
        fields = [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
        return {target.id for target in fields if isinstance(target, ast.Name)}
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    arguments = node.args
    return {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def version_of(library: str) -> str:
    """Return the version of an installed library. Skips the test if it is not installed."""
    folder = folder_of(library)
    if folder is None or not folder.is_dir():
        pytest.skip(f"{library} is not installed here")
    pattern = DISTRIBUTIONS.get(library, library)
    found = [re.fullmatch(rf"(?:{pattern})-([0-9.]+).*\.dist-info", path.name) for path in folder.parent.iterdir()]
    [version] = {match[match.lastindex or 1].rstrip(".") for match in found if match}
    return version


@pytest.mark.parametrize("library", VERSIONS)
def test_the_facts_are_those_of_the_installed_version(library: str) -> None:
    version = version_of(library)
    assert version in VERSIONS[library], f"read the facts about {library} anew (tests/guards/facts.py)"


@pytest.mark.parametrize("fact", (*SOURCES, *batch_invariance.SOURCES), ids=lambda fact: f"{fact.library}: {fact.why}")
def test_a_source_says_so(fact: Source) -> None:
    source = source_of(fact.library, fact.file)
    if fact.versions and version_of(fact.library) not in fact.versions:
        pytest.skip(f"a fact of {fact.library} {', '.join(fact.versions)}")
    part = ast.get_source_segment(source, node_of(source, fact.scope)) if fact.scope else source
    assert part is not None
    texts = [" ".join(text.split()) for text in (fact.text, fact.newer_text) if text]
    is_there = any(text in " ".join(part.split()) for text in texts)
    assert is_there is fact.is_there, f"{fact.library} {fact.file} {fact.scope}: no longer true that {fact.why}"


@pytest.mark.parametrize("fact", SIGNATURES, ids=lambda fact: f"{fact.library}: {fact.scope}")
def test_a_function_takes_what_it_is_given(fact: Signature) -> None:
    missing = set(fact.parameters) - parameters_of(node_of(source_of(fact.library, fact.file), fact.scope))
    assert not missing, f"{fact.library} {fact.file} {fact.scope} has no {missing}"


def test_the_guard_fails_where_a_fact_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/a.py").write_text("def f(x): return  1\n")
    monkeypatch.setenv("MEGARL_GPU_SITE", str(tmp_path))
    folder_of.cache_clear()
    try:
        test_a_source_says_so(Source("torch", "a.py", "f", "return 1", "it is one"))
        with pytest.raises(AssertionError, match="no longer true that it is two"):
            test_a_source_says_so(Source("torch", "a.py", "f", "return 2", "it is two"))
        with pytest.raises(AssertionError, match=r"f has no \{'y'\}"):
            test_a_function_takes_what_it_is_given(Signature("torch", "a.py", "f", ("x", "y")))
    finally:
        folder_of.cache_clear()
