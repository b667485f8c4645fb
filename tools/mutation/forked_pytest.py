"""pytest in forked processes, for many short runs in one copy of the repository: libraries are imported once.

    python -m tools.mutation.forked_pytest [--megatron]    # in the copy; requests and answers are lines of JSON

A run imports the package and its tests anew. Before the forks only `megarl.platform` and what lies below it is
imported, because its patches must come before Megatron. Layers below never import one of the changed modules.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Generator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "PASSIVE",
    # A pool of threads would not survive a fork.
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
"""As `tests/conftest.py` sets them before torch is imported."""
_IMPORTS = ("hypothesis", "numpy", "torch", "transformers", "aiohttp", "omegaconf", "safetensors.torch")
_MEGATRON = ("megatron.core", "megatron.core.models.gpt", "megatron.core.optimizer", "megatron.core.distributed")

_FAILED = 70
"""Exit code of a run that pytest has not ended (sysexits.h: an internal error)."""


class Reporter:
    """A plugin of pytest. It writes a line of JSON for each test: name, seconds, outcome, reached statements."""

    def __init__(self, file: Path, reached: Any) -> None:
        """Write to `file`. `reached` is the map of a copy with marked statements, None in other copies."""
        self._file, self._reached = file, reached
        self._failed = self._skipped = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._failed = self._skipped = False
        if self._reached is not None:
            self._reached[:] = bytes(len(self._reached))
        began = time.monotonic()
        result = yield
        row = {"test": item.nodeid, "seconds": round(time.monotonic() - began, 3), "failed": self._failed}
        if self._reached is not None:
            row["reached"] = [index for index, byte in enumerate(self._reached[:]) if byte]
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**row, "skipped": self._skipped}) + "\n")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.failed
        self._skipped |= report.skipped


def _run(arguments: Sequence[str], *, report: str, log: str, cpu_seconds: int) -> int:
    """Run pytest in this forked process. Return its exit code."""
    os.setsid()
    with open(log, "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    # An endless loop ends by SIGXCPU, on a loaded machine as on a quiet one.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 10))
    try:
        from megarl import statement_map

        reached: Any = statement_map.REACHED
    except ImportError:
        reached = None
    return pytest.main(list(arguments), plugins=[Reporter(Path(report), reached)])


def main() -> None:
    """Fork a process for each request until standard input ends. Answer with its process id, then its exit code."""
    os.environ.update(VARIABLES)
    requests = os.fdopen(os.dup(0), "r")
    answers = os.fdopen(os.dup(1), "w")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for name in _IMPORTS:
        importlib.import_module(name)
    for plugin in entry_points(group="pytest11"):
        plugin.load()
    if "--megatron" in sys.argv:
        from megarl.platform import libraries

        libraries.prepare_megatron()
        for name in _MEGATRON:
            importlib.import_module(name)
    for line in requests:
        pid = os.fork()
        if pid == 0:
            requests.close()
            answers.close()
            code = _FAILED
            try:
                code = _run(**json.loads(line))
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        print(pid, file=answers, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)


if __name__ == "__main__":
    main()
