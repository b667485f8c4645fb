"""Seconds until a rank has its engine and its model again after the loss of a rank: all ranks are forked again.

An item of `gpu_quarter.py`. The node's agent goes on, and forks the new rank from its fork server. On a CPU this server
has imported torch, Megatron-Core and vLLM. On a GPU it has imported nothing: Megatron-Core and vLLM import FlashInfer,
whose import initialises CUDA, and CUDA cannot be used after a fork.

Engines are eager: the capture of CUDA graphs takes as long in each start.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.cluster.launchers.local import LocalNodes
from megarl.planner.sizes import parallel_of
from megarl.platform import device
from megarl.preflight import load
from tools.bench.grpo_gpu import write_inputs
from tools.bench.parts.budget import Budget
from tools.bench.quarter.item_lines import START_TIMEOUT_SECONDS, ItemLines, Options, options_of
from tools.bench.quarter.run_items import run_options

WORKER = "megarl.worker.colocated"
ROUNDS = 2


class StartSeconds(NamedTuple):
    """Seconds of one start: of the process, of the worker with engine and model, and of their end."""

    process: float
    worker: float
    end: float


async def start_rank(nodes: LocalNodes, settings: Mapping[str, Any], logs: Path) -> StartSeconds:
    """Fork a rank, build its worker, and end it. Returns the seconds of each."""
    times = [time.monotonic()]
    group = WorkerGroup(1, places=nodes.choose_places(1, (), on_one_node=True))
    # As a run does: the first worker is small, and checks the node.
    await group.start(
        "megarl.cluster.checks.node_report:NodeReport",
        {},
        log_folder=logs,
        start_timeout_seconds=START_TIMEOUT_SECONDS,
        environment=nodes.environment,
        imports=nodes.imports,
    )
    try:
        times.append(time.monotonic())
        await group.construct(f"{WORKER}:Worker", settings)
        times.append(time.monotonic())
    finally:
        await group.close()
    times.append(time.monotonic())
    return StartSeconds(*(after - before for before, after in pairwise(times)))


async def measure(options: Options, lines: ItemLines, recipe_file: Path) -> None:
    """Write the seconds of the first start, and of later ones."""
    recipe = load(recipe_file, ["rollout.vllm.enforce_eager=true", f"rollout.kv_cache_gib={kv_cache_gib(options):g}"])
    parallel = parallel_of(recipe)
    settings = {"recipe": recipe, "parallel": parallel, "topology": [("node",)]}
    logs = options.work / "logs"
    started = time.monotonic()
    nodes = LocalNodes(device.rank_environment(1, options.device), device.forkable_imports(WORKER))
    await nodes.start(logs, START_TIMEOUT_SECONDS)
    try:
        agent_seconds = time.monotonic() - started
        first = await start_rank(nodes, settings, logs)
        seconds = agent_seconds + first.process + first.worker
        lines.write("first_start_seconds", [seconds], "s", against="an agent, a process, its imports, engine and model")
        starts = [await start_rank(nodes, settings, logs) for _ in range(ROUNDS)]
        lines.write("forked_process_seconds", [start.process for start in starts], "s")
        lines.write("forked_worker_seconds", [start.worker for start in starts], "s", against="engine and model")
        lines.write("rank_end_seconds", [start.end for start in starts], "s")
    finally:
        await nodes.close()


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
