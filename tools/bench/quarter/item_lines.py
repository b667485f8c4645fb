"""The part of a program that measures items of a list for `tools/gpu_quarter.py`.

`--items` names the program's items, with the seconds that each usually takes. The program writes the begin, the numbers
and the end of each item as JSON lines to a file that `gpu_quarter.py` follows; the environment variable
MEGARL_BENCH_LINES has its path. An item that fails does not end the program, unless CUDA is unusable afterwards.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.bench.parts import report
from tools.bench.parts.budget import Budget, add_budget
from tools.bench.quarter.quarter_sizes import SIZES, Size

START_TIMEOUT_SECONDS = 900.0
"""Limit of a rank's start, in place of megarl's 300 s. It is longer than the limit of any item, which counts instead: a
rehearsal on a busy CPU needs more than 300 s."""


class CudaLostError(Exception):
    """CUDA reports an error to every later call of this process, so no further item can be measured in it."""


class ItemLines:
    """Items of one program: which of them to measure, and their lines."""

    def __init__(self, seconds: dict[str, float], budget: Budget) -> None:
        """`seconds` are the usual ones of the items to measure."""
        self._seconds, self._budget = seconds, budget
        self._begun = ""

    def wants(self, name: str) -> bool:
        """Return whether to measure this item now. Writes a line if the budget has no time for it any more."""
        if name not in self._seconds:
            return False
        if self._budget.seconds_left < self._seconds[name]:
            why = (
                f"{self._budget.seconds_left:.0f} s of the budget are left, it usually takes {self._seconds[name]:g} s"
            )
            report.print_line({"end": name, "status": "no time", "why": why})
            return False
        return True

    def begin(self, name: str) -> None:
        """Write that an item begins. Done by `measuring` too, if it was not done before."""
        if name != self._begun:
            report.print_line({"begin": name})
            self._begun = name

    @contextmanager
    def measuring(self, name: str, *, begins: bool = True) -> Iterator[None]:
        """Context of an item that `wants` has allowed. Its error becomes a line. Raises CudaLostError.

        Without `begins` the program's start goes on in the context, and `begin` is called at its end.
        """
        if begins:
            self.begin(name)
        try:
            yield
        except LeftOutError as reason:
            report.print_line({"end": name, "status": "left out", "why": str(reason)})
        except Exception as error:
            traceback.print_exc()
            report.print_line({"end": name, "status": "failed", "why": f"{type(error).__name__}: {error}"[:1000]})
            free_memory()
            if is_cuda_lost(error):
                raise CudaLostError(str(error)) from error
        else:
            report.print_line({"end": name, "status": "done"})

    def write_line(self, line: Mapping[str, Any]) -> None:
        """Write a line that has no metric, such as one of a single round."""
        report.print_line(line)

    def write(self, metric: str, values: Sequence[float], unit: str, *, against: str = "", **more: Any) -> None:
        """Write the line of a metric: all its values, and their median."""
        line = report.metric_line(
            metric, values, unit, target=None, against=against, digits=6, machine={}, versions={}, **more
        )
        # The call's first line has the machine, and there are no targets.
        for name in ("target", "met", "machine", "versions"):
            del line[name]
        report.print_line(line)


class LeftOutError(Exception):
    """An item cannot be measured here. The text says why."""


def is_cuda_lost(error: Exception) -> bool:
    """Return whether CUDA stays unusable after an error. After running out of memory it stays usable."""
    return "CUDA error" in str(error)


def free_memory() -> None:
    """Free the GPU memory of an item that failed, if the program uses torch."""
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def engine_settings() -> dict[str, bool]:
    """Return vLLM's settings where torch cannot compile, as on an imitated GPU: eager; elsewhere none."""
    return {"enforce_eager": True} if os.environ.get("TORCHDYNAMO_DISABLE") == "1" else {}


class Options(argparse.Namespace):
    """Options of such a program."""

    items: dict[str, float]
    size: Size
    device: str
    work: Path
    budget_seconds: float


def options_of(description: str | None) -> Options:
    """Return the options of a program, given by `tools/gpu_quarter.py` or by hand."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", nargs="+", required=True, metavar="NAME=SECONDS", help="items to measure")
    parser.add_argument("--size", choices=SIZES, default="h200")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--work", type=Path, required=True, help="folder for models and runs")
    add_budget(parser)
    options = parser.parse_args(namespace=Options())
    options.size = SIZES[str(options.size)]
    options.items = {name: float(seconds) for name, _, seconds in (item.partition("=") for item in options.items)}
    if options.device == "cuda":
        from tools.bench.parts.device_parts import refuse_missing_cuda

        refuse_missing_cuda(options.device, "--device cpu --size tiny")
    return options
