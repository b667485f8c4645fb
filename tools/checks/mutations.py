"""Tests notice small changes of the code: of mutants drawn by seed, at least 92 % are killed.

    python tools/check.py mutations [--room algorithms] [--count 200] [--seed 1] [--jobs 2] [--fast] [--list] [--again]

A mutant is one change of one place (`tools/mutation/mutants.py`): an operator, a constant, a condition, a dropped
statement or wait, two swapped arguments. First each test file runs once in a copy whose statements note that they run
(`tools/mutation/marked_statements.py`). A mutant then meets only the tests that reach its statement, cheapest first,
until the first failure: those of the fast tier, then the slower ones. They run in copies of the repository, in
processes forked after the libraries were imported (`tools/mutation/forked_pytest.py`).

The folder `--work` holds records and results, one line of JSON for each try, so that a check that was ended goes on. A
record holds for one text of a test file and for the statements that a module had. A result holds for these statements
and for the tiers that were run.
Mutants that change nothing are in `tools/mutation/mutants_without_effect.json`, each with the reason.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from megarl.files.atomic import replace_text
from megarl.processes.process_tree import kill_tree
from tests.stand_ins.hidden_slurm import path_without_slurm
from tools.mutation.forked_pytest import VARIABLES
from tools.mutation.marked_statements import mark_statements, name_at, statements_of
from tools.mutation.mutants import Mutant, find_mutants, python_files
from tools.runs import ROOT

DURATION = {
    "small": "3 mutants of algorithms and the record of 49 test files, 4 min at a load of 30",
    "full": "hours: 200 mutants (not timed); a try of a fast mutant 5 s to 20 s at a load of 30 to 60",
}
SMALL = {"room": ["algorithms"], "count": 3}
MAIN_PATH: Final = (
    *("loops/rl.py", "loops/on_policy.py", "loops/step.py", "rollout/pool.py", "rollout/requests/queues.py"),
    *("rollout/requests/request_table.py", "models/policy.py", "training/model.py"),
    *("training/training_engine.py", "training/optimizer_step.py", "training/gradient_reduction.py", "training/rows"),
    *("training/objective.py", "cluster/rank_model.py"),
    *("reshard/live.py", "reshard/transport.py", "reshard/plan.py", "reshard/overlap.py", "reshard/staging.py"),
    *("worker/reshard", "worker/trainer_worker.py", "engine/engine.py", "engine/leader_requests.py"),
)
"""Files and folders of `megarl/` between the command and the loss, and between the loss and the engine's weights."""
ROOMS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "algorithms": (("algorithms",), ("algorithms", "rollout")),
    "rewards/maths": (("rewards/maths",), ("rewards",)),
    "reshard": (("reshard",), ("reshard", "planner", "training", "distributed")),
    "main path": (MAIN_PATH, ("training", "rollout", "loops", "models", "engine", "cluster", "reshard", "distributed")),
    "cluster": (("cluster",), ("cluster", "loops")),
    "data": (("data",), ("data",)),
    "rollout": (("rollout",), ("rollout",)),
    "planner": (("planner",), ("planner", "preflight")),
    "tracking": (("tracking",), ("tracking", "loops")),
}
"""The changed files of each room, and the folders of `tests/` that must notice changes."""
DRAWN_ROOMS: Final = ("algorithms", "rewards/maths", "reshard", "main path", "cluster")
"""The rooms of the goal, those whose tests are quick first."""
_WITHOUT_MEGATRON: Final = ("algorithms", "rewards/maths", "data", "rollout", "tracking")
"""Rooms whose fast tests do without Megatron. Its import takes 4 s of CPU time for each copy of the repository."""
COPIED = ("megarl", "tests", "tools", "launch", "checkpoints_convert", "pyproject.toml", "README.md", ".github")
WITHOUT_EFFECT = ROOT / "tools/mutation/mutants_without_effect.json"
LEAST_KILLED = 0.92
TIERS: Final = {"fast": "fast and not long", "slow": "not fast and not types and not long and not slurm"}
"""The markers of the tests that run by default and need nothing installed, in two parts."""
TIME_LIMIT: Final = "time limit"
"""The killer of a mutant whose tests did not end."""
_SPARE_CPU_SECONDS = 120
"""A mutant may make a loop endless. A process gets five times the tests' seconds as CPU time, and this many more."""
_WAITED_SECONDS = 600.0
"""A mutant may also wait forever. Its tests get ten times their seconds by the clock, and this many more."""

_RECORD_SECONDS = 200.0
"""Usual seconds of a batch of test files, of which limits are multiples."""
_BATCH_FILES = 6
"""Files of tests that are recorded in one run of pytest: each run starts and ends fork servers of its own."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--room", action="append", choices=ROOMS, help="only this room; may be repeated")
    parser.add_argument("--count", type=int, default=200, help="number of mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="number of mutants tried at the same time")
    parser.add_argument("--fast", action="store_true", help="try no test that starts ranks or runs")
    parser.add_argument("--list", action="store_true", help="print the drawn mutants, and try none")
    parser.add_argument("--again", action="store_true", help="try again the mutants that survived their last try")
    parser.add_argument("--work", type=Path, default=ROOT / "build/mutations", help="folder of records and results")


def draw(rooms: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants of the rooms, drawn by seed. Mutants without effect are left out."""
    without_effect = json.loads(WITHOUT_EFFECT.read_text(encoding="utf-8"))
    paths = sorted({path for room in rooms for path in modules_of(room)})
    mutants = [
        mutant for path in paths for mutant in find_mutants(ROOT, ROOT / path) if mutant.key not in without_effect
    ]
    # A place in the order by name only, so that a draw stays nearly the same when other code changes.
    mutants.sort(key=lambda mutant: hashlib.sha256(f"{seed} {mutant.key}".encode()).digest())
    by_kind: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_kind.setdefault(mutant.kind, []).append(mutant)
    # Kinds take turns: otherwise swapped arguments, which nearly any test notices, would be a quarter of all.
    in_turns = [mutant for turn in zip_longest(*by_kind.values()) for mutant in turn if mutant is not None]
    return in_turns[:count]


@cache
def modules_of(room: str) -> tuple[str, ...]:
    """Return the modules of a room, relative to the repository."""
    places = [ROOT / "megarl" / name for name in ROOMS[room][0]]
    files = [file for place in places for file in ([place] if place.is_file() else python_files(place))]
    return tuple(str(file.relative_to(ROOT)) for file in files)


def room_of(path: str) -> str:
    """Return the room of a module. The main path comes first: its files lie in other rooms' folders."""
    return next(room for room in ("main path", *ROOMS) if path in modules_of(room))


@dataclass(frozen=True, slots=True)
class TestRun:
    """What a run of pytest showed."""

    failed: str
    """The first failed test, TIME_LIMIT, "collection" if a file could not be imported; empty: none failed."""
    rows: list[dict[str, Any]]
    """The lines of `tools.mutation.forked_pytest.Reporter`."""


class Checkout(AbstractContextManager["Checkout"]):
    """A copy of the repository, and the process that runs pytest there. A context manager."""

    def __init__(self, folder: Path, *, with_megatron: bool) -> None:
        self.folder, self._with_megatron = folder, with_megatron
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("*.pyc.*"), symlinks=True)
            else:
                shutil.copy2(source, folder / name)
        self._num_writes = 0
        self._server: subprocess.Popen[bytes] | None = None

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            kill_tree(self._server.pid)
            self._server.communicate()

    def write(self, path: str, text: str) -> None:
        file = self.folder / path
        file.write_text(text, encoding="utf-8")
        # Python takes a compiled module for valid if second and size of its source agree.
        self._num_writes += 1
        future = time.time() + 60 * self._num_writes
        os.utime(file, (future, future))

    def run_tests(self, tests: Sequence[str], tier: str, seconds: float, *, all_tests: bool = False) -> TestRun:
        """Run tests until the first failure, or all. `seconds` is their usual time.

        Raises RuntimeError if pytest itself fails.
        """
        report, log = self.folder / "report.jsonl", self.folder / "pytest.log"
        report.write_text("", encoding="utf-8")
        arguments = [*([] if all_tests else ["-x"]), "-q", "-m", TIERS[tier], "-p", "no:cacheprovider", "-W", "ignore"]
        request = {
            "arguments": [*arguments, f"--basetemp={self.folder / 'pytest'}", *tests],
            "report": str(report),
            "log": str(log),
            "cpu_seconds": int(5 * seconds + _SPARE_CPU_SECONDS),
        }
        code = self._fork(request, 10 * seconds + _WAITED_SECONDS)
        rows = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
        failed = next((row["test"] for row in rows if row["failed"]), "")
        # pytest's codes: 0 passed, 1 failed, 2 interrupted by an error of a file's import, 5 no test selected.
        if code in (0, 1, 2, 5):
            return TestRun(failed or ("collection" if code in (1, 2) else ""), rows)
        if code is None:
            return TestRun(TIME_LIMIT, rows)
        text = log.read_text(encoding="utf-8", errors="replace")
        # 4: also raised where `conftest.py` cannot be imported.
        if code == 4 and "Error" in text and "not found" not in text:
            return TestRun("collection", rows)
        if code < 0:
            return TestRun(f"signal {-code}", rows)
        raise RuntimeError(f"pytest ended with {code}:\n{text[-3000:]}")

    def _fork(self, request: dict[str, Any], seconds: float) -> int | None:
        """Let the server fork a run of pytest. Return its exit code, or None if it was killed after `seconds`."""
        if self._server is None:
            # Tests hide Slurm by thousands of links, unless it is hidden before they start.
            path = path_without_slurm(os.environ["PATH"], self.folder / "without_slurm")
            environment = {**os.environ, **VARIABLES, "PYTHONPATH": str(self.folder), "PATH": path}
            command = [sys.executable, "-m", "tools.mutation.forked_pytest"]
            command += ["--megatron"] if self._with_megatron else []
            self._server = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        server = self._server
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(request).encode() + b"\n")
        pid = int(server.stdout.readline())
        is_late = not select.select([server.stdout], [], [], seconds)[0]
        if is_late:
            kill_tree(pid)
        code = int(server.stdout.readline())
        # What a failed run has left shall not disturb the next one.
        kill_tree(pid)
        # SIGXCPU: the limit of CPU time.
        return None if is_late or code == -signal.SIGXCPU else code


@dataclass(frozen=True, slots=True)
class Reach:
    """A test, its seconds, and the statements that it reaches, by name."""

    test: str
    seconds: float
    statements: frozenset[str]


@cache
def module_digest(path: str) -> str:
    """Return a hash of a module's statements by name. A record or result of a mutant holds while it is the same."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    names = [name for name, _ in statements_of(tree, path)]
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:12]


def read_record(file: Path, mutated: Sequence[str]) -> list[dict[str, Any]] | None:
    """Return the tests of a record. None: there is no record of the statements that the `mutated` modules have now."""
    if not file.exists():
        return None
    recorded: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    is_valid = all(recorded["modules"].get(path) == module_digest(path) for path in mutated)
    return recorded["tests"] if is_valid else None


def record(room: str, tier: str, mutated: Sequence[str], jobs: int, work: Path) -> list[Reach]:
    """Return the tests of a room with the statements of all rooms' modules that they reach.

    A record in `work` is read, not made again, if neither the test file nor a `mutated` module has changed.
    """
    files = [path for folder in ROOMS[room][1] for path in sorted((ROOT / "tests" / folder).rglob("test_*.py"))]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}
    # All rooms' modules, because a record serves other rooms too.
    modules = sorted({path for room in ROOMS for path in modules_of(room)})
    digests = {path: module_digest(path) for path in modules}
    records = {
        path: work / tier / f"{path.replace('/', '.')}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
        for path, text in texts.items()
    }
    missing = [path for path, file in records.items() if read_record(file, mutated) is None]
    if missing:
        (work / tier).mkdir(parents=True, exist_ok=True)
        with _checkouts(min(jobs, len(missing)), room) as free, ThreadPoolExecutor(jobs) as pool:
            names: list[str] = []
            for _ in range(free.qsize()):
                checkout = free.get()
                # Each copy gets equal marks.
                names = mark_statements(checkout.folder, modules)
                free.put(checkout)

            def record_files(paths: Sequence[str]) -> None:
                checkout = free.get()
                try:
                    outcome = checkout.run_tests(paths, tier, _RECORD_SECONDS, all_tests=True)
                finally:
                    free.put(checkout)
                if outcome.failed:
                    print(f"{' '.join(paths)}, unchanged: {outcome.failed}", file=sys.stderr, flush=True)
                for path in paths:
                    tests = [
                        {**row, "reached": [names[index] for index in row["reached"]]}
                        for row in outcome.rows
                        if row["test"].startswith(f"{path}::") and not row["skipped"]
                    ]
                    replace_text(records[path], json.dumps({"modules": digests, "tests": tests}))

            batches = [missing[first : first + _BATCH_FILES] for first in range(0, len(missing), _BATCH_FILES)]
            list(pool.map(record_files, batches))
    rows = [row for file in records.values() for row in read_record(file, mutated) or []]
    return [Reach(row["test"], row["seconds"], frozenset(row["reached"])) for row in rows if not row["failed"]]


@contextmanager
def _checkouts(count: int, room: str) -> Iterator[SimpleQueue[Checkout]]:
    """Context with a queue of copies of the repository, removed in the end."""
    free = SimpleQueue[Checkout]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mutations-")))
        for number in range(count):
            checkout = Checkout(folder / str(number), with_megatron=room not in _WITHOUT_MEGATRON)
            free.put(stack.enter_context(checkout))
        yield free


def tests_for(statement: str, reaches: Sequence[Reach]) -> tuple[list[str], float]:
    """Return the tests that reach a statement, by its name, cheapest first, and the sum of their seconds."""
    chosen = sorted((reach for reach in reaches if statement in reach.statements), key=lambda reach: reach.seconds)
    return [reach.test for reach in chosen], sum(reach.seconds for reach in chosen)


def read_results(work: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the tries of each mutant by its key, oldest first."""
    file = work / "results.jsonl"
    tries: dict[str, list[dict[str, Any]]] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        row = json.loads(line)
        tries.setdefault(row["change"], []).append(row)
    return tries


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    rooms = options.room or list(DRAWN_ROOMS)
    mutants = draw(rooms, options.count, options.seed)
    if options.list:
        for mutant in mutants:
            yield {"place": f"{mutant.path}:{mutant.line}", "kind": mutant.kind, "change": mutant.key}
        return
    tiers = ["fast"] if options.fast else list(TIERS)
    tries = valid_tries(read_results(options.work), mutants)
    wanted = [mutant for mutant in mutants if is_wanted(tries.get(mutant.key, []), tiers, again=options.again)]
    # The rooms whose tests are quick come first.
    for room in ROOMS:
        mutants_of_room = [mutant for mutant in wanted if room_of(mutant.path) == room]
        if mutants_of_room:
            _try_all(mutants_of_room, room, tiers, options)
    yield from table(mutants, valid_tries(read_results(options.work), mutants))


def valid_tries(
    tries: Mapping[str, list[dict[str, Any]]], mutants: Sequence[Mutant]
) -> dict[str, list[dict[str, Any]]]:
    """Return the tries of the mutants, by key, that were made on the statements which their modules have now."""
    valid = {
        mutant.key: [row for row in tries.get(mutant.key, []) if row.get("module") == module_digest(mutant.path)]
        for mutant in mutants
    }
    return {key: rows for key, rows in valid.items() if rows}


def is_wanted(tries: Sequence[Mapping[str, Any]], tiers: Sequence[str], *, again: bool) -> bool:
    """Return whether a mutant must be tried. A survivor must be if its last try left out a tier, or with `again`."""
    if not tries:
        return True
    last = tries[-1]
    return not last["killer"] and (again or not set(tiers) <= set(last["tiers"]))


def _try_all(mutants: Sequence[Mutant], room: str, tiers: Sequence[str], options: argparse.Namespace) -> None:
    """Try the mutants of a room. Append a line of JSON for each to the results."""
    mutated = sorted({mutant.path for mutant in mutants})
    reaches = {tier: record(room, tier, mutated, options.jobs, options.work) for tier in tiers}
    lock = threading.Lock()
    # Read once, because a mutant is a place in a text.
    sources = {mutant.path: (ROOT / mutant.path).read_text(encoding="utf-8") for mutant in mutants}
    with (
        _checkouts(options.jobs, room) as free,
        ThreadPoolExecutor(options.jobs) as pool,
        (options.work / "results.jsonl").open("a", encoding="utf-8") as results,
    ):

        def try_mutant(mutant: Mutant) -> None:
            checkout, began, killer, num_tests = free.get(), time.monotonic(), "", 0
            source = sources[mutant.path]
            try:
                statement = name_at(source, mutant.path, mutant.line)
                checkout.write(mutant.path, mutant.apply(source))
                for tier, recorded in reaches.items():
                    tests, seconds = tests_for(statement, recorded)
                    num_tests += len(tests)
                    if tests and not killer:
                        killer = checkout.run_tests(tests, tier, seconds).failed
            finally:
                checkout.write(mutant.path, source)
                free.put(checkout)
            row = {
                "room": room,
                "place": f"{mutant.path}:{mutant.line}",
                "kind": mutant.kind,
                "change": mutant.key,
                "module": module_digest(mutant.path),
                "tiers": tiers,
                "tests": num_tests,
                "killer": killer,
                "seconds": round(time.monotonic() - began, 1),
            }
            with lock:
                print(json.dumps(row), file=results, flush=True)

        for done in as_completed([pool.submit(try_mutant, mutant) for mutant in mutants]):
            done.result()


def table(mutants: Sequence[Mutant], tries: Mapping[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each survivor and each time limit, then one for each room, then one for all.

    Without a tried mutant the last row fails: nothing was proved.
    """
    last = {mutant.key: tries[mutant.key][-1] for mutant in mutants if mutant.key in tries}
    for row in last.values():
        if row["killer"] in ("", TIME_LIMIT):
            yield {
                "place": row["place"],
                "kind": f"{row['kind']}: {row['killer'] or 'survived'}",
                "change": row["change"],
            }
    for room in dict.fromkeys(row["room"] for row in last.values()):
        keys = [key for key, row in last.items() if row["room"] == room]
        num_first, num_last = (sum(bool(tries[key][index]["killer"]) for key in keys) for index in (0, -1))
        yield {"place": room, "kind": f"{num_last} of {len(keys)} killed", "change": f"{num_first} at the first try"}
    num_killed = sum(bool(row["killer"]) for row in last.values())
    share = num_killed / len(last) if last else 0.0
    yield {
        "place": "all rooms",
        "kind": f"{num_killed} of {len(last)} killed",
        "change": f"{share:.1%}",
        "met": share >= LEAST_KILLED,
    }
