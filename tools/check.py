"""Run a check: a measurement, or a proof on a user's recipe or packages. Prints a table; exits with 1 if a row fails.

    python tools/check.py --list
    python tools/check.py NAME [--size small|full] [--json FILE] [options of the check: NAME --help]

A proof that needs neither is a test, marked `long` if it takes more than a minute: `launch/test.sh --tier long`.

A check is a module of `tools/checks/`. Its docstring says what it proves, `DURATION` how long it takes, and `SMALL` the
values of its options at the small size. `add_options(parser)` adds these options, and `run(options)` yields the rows of
the table. A row fails if its `met` is false. A row without `met` is only shown.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import resource
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

ROOT = Path(__file__).resolve().parents[1]
NAMES = sorted(path.stem for path in (ROOT / "tools/checks").glob("*.py"))
TEXT_WIDTH, NUMBER_WIDTH = 16, 9


class Check(Protocol):
    """The contents of a module of `tools/checks/`."""

    __doc__: str
    DURATION: Mapping[str, str]
    """Time by size: measured seconds on two CPU cores, or of CPU time; where it was not timed, what is run."""
    SMALL: Mapping[str, Any]

    def add_options(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> Iterable[dict[str, Any]]: ...


def load(name: str) -> Check:
    """Return a check's module."""
    return cast(Check, importlib.import_module(f"tools.checks.{name}"))


def describe(name: str) -> str:
    """Return what a check proves, and its sizes with the time they take."""
    # Read, not imported: some checks import torch and transformers, which takes seconds.
    module = ast.parse((ROOT / f"tools/checks/{name}.py").read_text(encoding="utf-8"))
    proof = (ast.get_docstring(module) or "").partition("\n")[0]
    [duration] = [
        ast.literal_eval(node.value)
        for node in module.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DURATION"
    ]
    return f"{name}\n    {proof}\n    " + "; ".join(f"{size}: {time}" for size, time in duration.items())


def parse(name: str, check: Check, arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of a check. The small size replaces their defaults."""
    parser = argparse.ArgumentParser(
        prog=f"check.py {name}", description=check.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=list(check.DURATION), default="full", help="small sets other defaults")
    parser.add_argument("--json", type=Path, help="append each row to this file as a line of JSON")
    check.add_options(parser)
    if parser.parse_args(arguments).size == "small":
        parser.set_defaults(**check.SMALL)
    return parser.parse_args(arguments)


class Table:
    """A table that is printed row by row. The first row names the columns."""

    def __init__(self) -> None:
        self._columns: dict[str, int] = {}

    def print_row(self, row: Mapping[str, Any]) -> None:
        values = {name: _text(value) for name, value in row.items() if name != "met"}
        if not self._columns:
            for name, value in values.items():
                min_width = TEXT_WIDTH if isinstance(row[name], str) else NUMBER_WIDTH
                self._columns[name] = max(min_width, len(name), len(value))
            print("".join(f"{name:<{width}}  " for name, width in self._columns.items()).rstrip())
        cells = [f"{values.get(name, '-'):<{width}}  " for name, width in self._columns.items()]
        verdict = {True: "ok", False: "FAILS", None: ""}[row.get("met")]
        print("".join(cells) + verdict, flush=True)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return " ".join(map(_text, value)) if isinstance(value, (list, tuple)) else str(value)


def run(name: str, arguments: Sequence[str]) -> int:
    """Run a check. Returns 1 if a row fails or there is none."""
    check = load(name)
    options = parse(name, check, arguments)
    table, verdicts, started = Table(), [], time.monotonic()
    for row in check.run(options):
        table.print_row(row)
        verdicts.append(row.get("met", True))
        if options.json:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    num_failed = verdicts.count(False)
    seconds = f"{time.monotonic() - started:.0f} s, {_cpu_seconds():.0f} s of CPU time"
    print(f"{name}: {len(verdicts)} rows, {num_failed} failed, {seconds}")
    return int(num_failed > 0 or not verdicts)


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print what each check proves, its sizes and their times")
    parser.add_argument("name", nargs="?", choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of the check")
    command = parser.parse_args(arguments)
    if command.list:
        print("\n".join(map(describe, NAMES)))
        return 0
    if command.name is None:
        parser.error("a NAME is missing; --list shows all")
    return run(command.name, command.options)


if __name__ == "__main__":
    # Checks and makers import one another as modules of the repository, not of this folder.
    sys.path[0] = str(ROOT)
    sys.exit(main())
