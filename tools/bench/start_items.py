"""Seconds until a rank has its engine and its model again: in a process that stays, or in a forked one.

An item of `gpu_quarter.py`. Kinds of processes:

- `stays`: the process of the rank before. It leaves its torch world and frees its memory first.
- `forked`: a new process from megarl's fork server, which on a GPU has imported nothing.
- `forked_warm`: a new process from a fork server that has imported torch, Megatron-Core and vLLM. On a CPU only:
  Megatron-Core and vLLM import FlashInfer, whose import initialises CUDA, and CUDA cannot be used after a fork.

Engines are eager: the capture of CUDA graphs takes as long in each kind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from budget import Budget
from grpo_gpu import write_inputs
from item_lines import ItemLines, Options, options_of
from run_items import run_options

from megarl.cluster.local import LocalGroup
from megarl.planner.sizes import parallel_of
from megarl.platform import device
from megarl.preflight import load

WORKER = "megarl.worker.colocated"
ROUNDS = 2


class Starts:
    """A group of one rank whose worker is built again and again. `seconds` are by kind: process, then worker."""

    def __init__(self, settings: Mapping[str, Any], logs: Path) -> None:
        self._settings, self._logs = settings, logs
        self.seconds: dict[str, list[tuple[float, float]]] = {}
        self._group: Any = None

    async def first(self, imports: Sequence[str], environment: Mapping[str, str]) -> float:
        """Start the first process and its worker. Returns the seconds of both."""
        started = time.monotonic()
        group = LocalGroup(1, imports=imports)
        await group.start(f"{WORKER}:Worker", self._settings, log_folder=self._logs, environment=environment)
        self._group = group
        return time.monotonic() - started

    async def again(self, kind: str, source: int | None) -> None:
        """Build the worker in the process of rank `source`; None: in a new process."""
        started = time.monotonic()
        await self._group.set_apart()
        self._group = await self._group.successor([source], self._logs)
        has_process = time.monotonic()
        await self._group.construct(f"{WORKER}:Worker", self._settings)
        self.seconds.setdefault(kind, []).append((has_process - started, time.monotonic() - has_process))

    async def close(self) -> None:
        if self._group is not None:
            await self._group.close()


async def measure(options: Options, lines: ItemLines, recipe_file: Path) -> None:
    """Write the seconds of each kind of start."""
    recipe = load(recipe_file, ["rollout.vllm.enforce_eager=true", f"rollout.kv_cache_gib={kv_cache_gib(options):g}"])
    parallel = parallel_of(recipe)
    settings = {"recipe": recipe, "parallel": parallel, "topology": [("node",)]}
    environment, is_gpu = device.rank_environment(1, options.device), options.device == "cuda"
    imports = device.forkable_imports(WORKER)
    starts = Starts(settings, options.work / "logs")
    try:
        first = await starts.first(imports, environment)
        lines.write("first_start_seconds", [first], "s", against="a process, its imports, engine and model")
        for kind, source in (("forked" if is_gpu else "forked_warm", None), ("stays", 0)):
            for _ in range(ROUNDS):
                await starts.again(kind, source)
            write_kind(lines, starts, kind)
    finally:
        await starts.close()


def write_kind(lines: ItemLines, starts: Starts, kind: str) -> None:
    """Write the seconds of all starts of a kind."""
    process, worker = zip(*starts.seconds[kind], strict=True)
    lines.write(f"{kind}_process_seconds", process, "s")
    lines.write(f"{kind}_worker_seconds", worker, "s", against="engine and model")


def kv_cache_gib(options: Options) -> float:
    """Return the size of the engine's cache. Its size hardly changes the seconds of a start."""
    return min(4.0, options.size.kv_cache_gib)


def main() -> None:
    options = options_of(__doc__)
    lines = ItemLines(options.items, Budget(options.budget_seconds))
    if not lines.wants("rank_starts"):
        return
    folder = options.work / "start"
    folder.mkdir(parents=True, exist_ok=True)
    settings = run_options(options.size, options.device)
    settings.shape = options.size.start_shape
    recipe = write_inputs(settings, folder)
    with lines.measuring("rank_starts"):
        asyncio.run(measure(options, lines, recipe))


if __name__ == "__main__":
    main()
