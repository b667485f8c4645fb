"""Tests notice small changes of the code: of mutants drawn by seed, at least 92 % are killed.

    python tools/check.py mutations [--package algorithms] [--count 200] [--seed 1] [--jobs 2] [--fast] [--list]

A mutant is one change of one place (`tools/mutants.py`): an operator, a constant, a condition, a dropped statement, two
swapped arguments. The tests that import its module run with it, then all of its package, until the first
failure. A mutant that survives the fast tests meets the slower tests of the package. A row per survivor, then one row
for each package. Mutants that change nothing are in `tools/mutants_without_effect.json`, each with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from megarl.processes.process_tree import kill_tree
from tools.mutants import Mutant, find_mutants, python_files
from tools.runs import ROOT

DURATION = {"small": "3 mutants of algorithms, 40 s", "full": "hours: 200 mutants (not timed)"}
SMALL = {"package": ["algorithms"], "count": 3}
PACKAGES = {
    "algorithms": ("algorithms",),
    "data": ("data",),
    "rollout": ("rollout",),
    "training": ("training", "models"),
    "models": ("models",),
    "families": ("families", "checkpoint"),
    "reshard": ("reshard", "training"),
    "cluster": ("cluster",),
    "rewards/maths": ("rewards",),
    "planner": ("planner", "preflight"),
    "datasets": ("preflight",),
    "tracking": ("tracking", "loops"),
    "worker": ("worker", "training"),
}
"""Packages whose code is changed, and the folders of `tests/` that must notice it."""
COPIED = ("megarl", "tests", "tools", "launch", "checkpoints_convert", "pyproject.toml", "README.md", ".github")
WITHOUT_EFFECT = ROOT / "tools/mutants_without_effect.json"
LEAST_KILLED = 0.92
_SPARE_SECONDS = 60.0
"""A mutant may make a loop endless. Its tests get three times the seconds of the unchanged code, and this many more."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--package", action="append", choices=PACKAGES, help="only this package; may be repeated")
    parser.add_argument("--count", type=int, default=200, help="number of mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="number of mutants tried at the same time")
    parser.add_argument("--fast", action="store_true", help="try no test that starts ranks or runs")
    parser.add_argument("--list", action="store_true", help="print the drawn mutants, and try none")


def draw(packages: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants of the packages, drawn by seed. Mutants without effect are left out."""
    without_effect = json.loads(WITHOUT_EFFECT.read_text(encoding="utf-8"))
    mutants = [
        mutant
        for package in packages
        for path in python_files(ROOT / "megarl" / package)
        for mutant in find_mutants(ROOT, path)
        if mutant.key not in without_effect
    ]
    random.Random(seed).shuffle(mutants)
    by_kind: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_kind.setdefault(mutant.kind, []).append(mutant)
    # Kinds take turns: otherwise swapped arguments, which nearly any test notices, would be a quarter of all.
    in_turns = [mutant for turn in zip_longest(*by_kind.values()) for mutant in turn if mutant is not None]
    return in_turns[:count]


class _Checkout:
    """A copy of the repository in which one mutant at a time is tried."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("*.pyc.*"), symlinks=True)
            else:
                shutil.copy2(source, folder / name)
        self._num_writes = 0

    def write(self, path: str, text: str) -> None:
        file = self._folder / path
        file.write_text(text, encoding="utf-8")
        # Python takes a compiled module for valid if second and size of its source agree.
        self._num_writes += 1
        future = time.time() + 60 * self._num_writes
        os.utime(file, (future, future))

    def run_tests(self, paths: Sequence[str], marker: str, seconds: float | None) -> tuple[str, float]:
        """Run tests until the first failure. Returns the failed test (empty: none failed), and the seconds.

        Raises RuntimeError if pytest itself fails.
        """
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", marker, "-p", "no:cacheprovider", "--no-header"]
        command += [f"--basetemp={self._folder / 'pytest'}", "-W", "ignore", *paths]
        environment = {**os.environ, "PYTHONPATH": str(self._folder), "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            command,
            cwd=self._folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                kill_tree(process.pid)
                process.communicate()
                return "time limit", time.monotonic() - began
        failures = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        # 5: pytest selected no test.
        if process.returncode in (0, 5):
            return "", time.monotonic() - began
        if not failures and process.returncode != 1 and "Error" not in output:
            raise RuntimeError(f"pytest ended with {process.returncode}:\n{output[-3000:]}")
        return failures[0].split(" - ")[0] if failures else "import", time.monotonic() - began


@lru_cache(maxsize=1)
def _texts_of_tests() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py"))}


def tests_of(mutant: Mutant) -> list[str]:
    """Return the tests for a mutant: the files that import its module first, then all of its package's folders."""
    package, _, module = mutant.path.removesuffix(".py").replace("/", ".").rpartition(".")
    imports = rf"\b{re.escape(package)}(\.{module}\b| import .*\b{module}\b)"
    files = [path for path, text in _texts_of_tests().items() if re.search(imports, text)]
    return [*(str(path.relative_to(ROOT)) for path in files), *_folders_of(_package_of(mutant))]


def _package_of(mutant: Mutant) -> str:
    return next(name for name in PACKAGES if mutant.path.startswith(f"megarl/{name}/"))


def _folders_of(package: str) -> tuple[str, ...]:
    """Return the folders with the tests of a package, as far as they exist."""
    return tuple(f"tests/{folder}" for folder in PACKAGES[package] if (ROOT / "tests" / folder).is_dir())


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    mutants = draw(options.package or list(PACKAGES), options.count, options.seed)
    if options.list:
        for mutant in mutants:
            yield {"place": f"{mutant.path}:{mutant.line}", "kind": mutant.kind, "change": mutant.key}
        return
    num_killed, num_tried = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        free = SimpleQueue[_Checkout]()
        for number in range(options.jobs):
            free.put(_Checkout(Path(folder) / str(number)))
        lock = threading.Lock()
        limits: dict[str, float] = {}

        def limit_of(package: str, checkout: _Checkout) -> float:
            """Return the time limit in seconds of a package's fast tests, measured once with the unchanged code."""
            with lock:
                if package not in limits:
                    failure, seconds = checkout.run_tests(_folders_of(package), "fast and not long", None)
                    if failure:
                        raise SystemExit(f"the tests of the unchanged code fail: {failure}")
                    limits[package] = 3 * seconds + _SPARE_SECONDS
                return limits[package]

        def try_mutant(mutant: Mutant) -> str:
            """Return the test that noticed a mutant; empty: none."""
            checkout = free.get()
            source = (ROOT / mutant.path).read_text(encoding="utf-8")
            paths = tests_of(mutant)
            try:
                limit = limit_of(_package_of(mutant), checkout)
                checkout.write(mutant.path, mutant.apply(source))
                killer, _ = checkout.run_tests(paths, "fast and not long", limit)
                if not killer and not options.fast:
                    slower = "not fast and not types and not long and not slurm"
                    killer, _ = checkout.run_tests(paths, slower, 10 * limit)
                return killer
            finally:
                checkout.write(mutant.path, source)
                free.put(checkout)

        tries = {pool.submit(try_mutant, mutant): mutant for mutant in mutants}
        for done in as_completed(tries):
            mutant, killer = tries[done], done.result()
            package = _package_of(mutant)
            num_tried[package] += 1
            num_killed[package] += bool(killer)
            if not killer:
                yield {"place": f"{mutant.path}:{mutant.line}", "kind": mutant.kind, "change": mutant.key}
    for package, count in num_tried.items():
        yield {"place": package, "kind": f"{num_killed[package]} of {count} killed", "change": "-"}
    share = num_killed.total() / num_tried.total()
    yield {
        "place": "all packages",
        "kind": f"{num_killed.total()} of {num_tried.total()} killed",
        "change": f"{share:.1%}",
        "met": share >= LEAST_KILLED,
    }
