"""The driver of a run of a thousand ranks, on one machine: what it costs, with ranks that compute nothing.

    python tools/bench/driver.py [--ranks 1024] [--per-node 8] [--samples 512] [--tokens 8192]

The driver's parts are those of a run (`Buffer` and `EnginePool`, `RLBatch` and `RankModel`, the calls of a step of RL,
the merge of their metrics, the comparison of the plans' digests). So are the agents and their connections. Only the
ranks are not (`idle_ranks`).

Prints one JSON object a line, then a table of the calls. Measured is the CPU time of the driver's process alone: the
ranks share the machine's cores, so a call lasts longer than on a cluster. Exits with 1 where a target is missed, unless
`--no-limits`.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.cluster.rank_model import RankModel
from megarl.cluster.run_ranks import RunRanks
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.loops.measuring.performance import Performance
from megarl.loops.reshard_schedule import reshard_metrics
from megarl.rollout.attempt import Task
from megarl.rollout.buffer import GroupBuffer
from megarl.rollout.pool import EnginePool
from megarl.rollout.requests.engine_requests import Generates, seed_of
from megarl.rollout.source import Source
from megarl.rollout.state import Group, RLState
from megarl.rollout.step.advantages import compute_advantages, compute_importance_weights
from megarl.rollout.step.rl_batch import RLBatch
from megarl.rollout.step.step_metrics import step_metrics
from megarl.rollout.step.updates import update_metrics
from megarl.rollout.stitch import ModelCall, stitch
from megarl.types import Problem, Request, Reward, SamplingSettings, Trajectory
from tools.bench.idle_ranks import IdleNodes
from tools.bench.parts.report import machine, metric_line, print_line, versions

SAMPLES_PER_PROMPT, PROMPT_TOKENS = 16, 512
LIMITS = {
    "driver_cpu_per_call": "<= 10",
    "driver_cpu_of_rows": "<= 2",
    "driver_cpu_of_start": "<= 30",
}
"""Targets by metric: ms, s, s of CPU."""
_TCP_INFO_BYTES = struct.Struct("<120xQQ")
"""Of Linux's `tcp_info`: bytes that the other end acknowledged, bytes received."""


@dataclass(slots=True)
class Cost:
    """What the driver used: seconds of its CPU and of the clock; bytes and messages to and from the ranks."""

    cpu: float = 0.0
    wall: float = 0.0
    sent: int = 0
    received: int = 0
    messages: int = 0


class MeasuredGroup(WorkerGroup):
    """Ranks whose start and messages are measured. `costs` are by name; those of a start are `start.STAGE`."""

    def __init__(self, world_size: int) -> None:
        """Create a group without places."""
        super().__init__(world_size)
        self.costs: dict[str, list[Cost]] = {}
        self._num_messages = 0

    @property
    def connections(self) -> list[socket.socket]:
        """The connections to the agents."""
        return [agent._socket for agent in dict.fromkeys(place.agent for place in self.places)]

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the cost of this context to `costs[name]`: CPU, time, bytes and messages of the driver."""
        before = self._read_counters()
        yield
        used = [after - earlier for after, earlier in zip(self._read_counters(), before, strict=True)]
        self.costs.setdefault(name, []).append(Cost(used[0], used[1], *map(int, used[2:])))

    async def start_on(self, nodes: IdleNodes, kwargs: Mapping[str, Any], folder: Path, timeout_seconds: float) -> None:
        """Start the agents of all nodes, and then the ranks."""
        with self.measure("start"):
            with self.measure("start.connect"):
                await nodes.start(folder, timeout_seconds)
            self.ranks.places = nodes.choose_places(self.world_size, (), on_one_node=False)
            fork = self.ranks.fork

            async def fork_measured(
                log_folder: Path, environment: Mapping[str, str], imports: Sequence[str], timeout_seconds: float
            ) -> None:
                with self.measure("start.fork"):
                    await fork(log_folder, environment, imports, timeout_seconds)

            self.ranks.fork = fork_measured
            await self.start(
                "tools.bench.idle_ranks:Idle", kwargs, log_folder=folder, start_timeout_seconds=timeout_seconds
            )

    async def construct(self, worker: str, kwargs: Mapping[str, Any]) -> None:
        with self.measure("start.construct"):
            await super().construct(worker, kwargs)

    async def _exchange(
        self, method: str, ranks: Sequence[int], messages: Sequence[bytes], *args: Any, **kwargs: Any
    ) -> list[Any]:
        self._num_messages += len(messages)
        return await super()._exchange(method, ranks, messages, *args, **kwargs)

    def _read_counters(self) -> tuple[float, ...]:
        tcp_counts = [
            _TCP_INFO_BYTES.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES.size))
            for connection in self.connections
        ]
        sent, received = (sum(counts) for counts in zip(*tcp_counts, strict=True)) if tcp_counts else (0, 0)
        return time.process_time(), time.monotonic(), sent, received, self._num_messages


@dataclass(frozen=True)
class Attempts:
    """Single-turn attempts without texts: one request each, rewarded by chance. In the place of a `GroupSampler`."""

    pool: EnginePool

    def is_abandoned(self) -> bool:
        return False

    def task(
        self, problem: Problem, group: int, number: int, seed: str, sampling: SamplingSettings, *, prefix: str = ""
    ) -> Task:
        return Task("single_turn", problem, group, number, seed, sampling, prefix)

    async def attempt(
        self, task: Task, pool: Generates, before_score: Callable[[], object] = lambda: None
    ) -> Trajectory:
        prompt, seed = np.array(task.problem.prompt_token_ids, np.int32), seed_of(task.seed, task.name)
        completion = await pool.generate(Request(task.name, prompt, task.sampling, seed), is_last=True)
        before_score()
        reward = Reward(float(seed % 2), True, seed % 2 == 1)
        segments = stitch([ModelCall(prompt, completion)])
        return Trajectory("single_turn", task.problem, task.group, task.number, segments, reward)


@dataclass
class Driver:
    """The parts of a run's driver, for ranks of one replica a node."""

    group: MeasuredGroup
    parallel: ParallelConfig
    num_samples: int
    mean_tokens: int
    recipe: Recipe = field(init=False)
    num_tokens: int = 0

    def __post_init__(self) -> None:
        # Completions have a third of the limit to all of it.
        limit = (self.mean_tokens - PROMPT_TOKENS) * 3 // 2
        self.recipe = Recipe.model_validate(
            {
                "name": "driver", "loop": "rl", "model": {"path": "none"}, "data": {"train": "none"},
                "train": {
                    "prompts_per_step": self.num_samples // SAMPLES_PER_PROMPT,
                    "samples_per_prompt": SAMPLES_PER_PROMPT,
                },
                "rollout": {"sampling": {"max_new_tokens": limit}},
                "algorithm": {"importance_sampling": "tis"},
            }
        )  # fmt: skip
        self.policy = RankModel(self.group, self.parallel, PROMPT_TOKENS + limit)
        self.performance = Performance(self.recipe, RunRanks(self.group), {"policy": self.policy})
        self.pool = EnginePool(self.group, self.parallel, max_running=64)
        self.state = RLState(self.recipe.algorithm)
        self.buffer = GroupBuffer(self.recipe, self._sources(), self.state)

    def _sources(self) -> list[Source]:
        random, attempts = np.random.default_rng(0), cast(Any, Attempts(self.pool))
        (source,) = self.recipe.sources
        count = self.recipe.train.prompts_per_step
        prompts = random.integers(0, 150000, (count, PROMPT_TOKENS)).tolist()
        problems = [Problem(n, (), tuple(prompt), "", source=source.name) for n, prompt in enumerate(prompts)]
        return [Source(source.name, source.weight, source.recipe, attempts, problems)]

    async def begin(self) -> None:
        """Check that all ranks have the same plan, then start the performance metrics, as a run does."""
        with self.group.measure("start.digests"):
            digests = await self.group.call("plan_digest")
            assert len(set(digests)) == 1
        await self.performance.begin_measuring()

    async def measure_idle_calls(self, repeats: int) -> None:
        """Measure calls of all ranks that do nothing, then calls of each engine, as the engines' pumps make them."""
        tp = self.parallel.rollout_tp
        replicas = [range(leader, leader + tp) for leader in self.parallel.leaders()]
        await self.group.call("nothing")
        for _ in range(repeats):
            with self.group.measure("call"):
                await self.group.call("nothing")
            nothing: list[Any] = [((), ())] * tp
            with self.group.measure("advance"):
                await asyncio.gather(*(self.group.ask(ranks, "advance", nothing, 0.0, 1) for ranks in replicas))

    async def step(self, number: int) -> dict[str, float]:
        """Make a step of RL with the calls of `loops.rl`. Returns its metrics."""
        measure, recipe, began = self.group.measure, self.recipe, time.monotonic()
        with measure("step.sample"):
            groups = await self.buffer.take(recipe.train.prompts_per_step, weight_version=number)
        with measure("step.sleep"):
            await self.pool.pause()
            await self.group.call("sleep_engine")
        with measure("step.logprobs"):
            batch = RLBatch.from_groups(groups)
            # Stale groups need this pass: their correction compares log-probs with the trainer's before the update.
            logprobs = await self.policy.forward(batch)
            batch.per_token["old_logprobs"] = np.where(batch.loss_mask, logprobs, np.float32(0))
        with measure("step.batch"):
            self.num_tokens = len(batch.token_ids)
            metrics = compute_advantages(batch, recipe, 0.0) | compute_importance_weights(batch, recipe.algorithm)
            minibatches = batch.minibatches(recipe, number)
        updates = []
        for minibatch in minibatches:
            with measure("step.update"):
                updates.append(await self.policy.update(minibatch, 0.0))
        with measure("step.metrics"):
            metrics |= update_metrics([update.metrics for update in updates]) | self._metrics_of(groups, number)
            seconds = {"time/step_seconds": time.monotonic() - began}
            metrics |= await self.performance.measure_step(seconds, metrics)
        with measure("step.reshard"):
            reports = await self.group.call("reshard", verify=False)
            metrics |= reshard_metrics(reports)
            self.pool.resume()
        return metrics

    def _metrics_of(self, groups: Sequence[Group], number: int) -> dict[str, float]:
        return step_metrics(self.buffer.sampled, groups, self.recipe, weight_version=number) | self.buffer.metrics()


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start ranks, and measure calls and steps. Returns the costs, and the memory in bytes."""
    size = options.ranks
    tp = min(options.per_node, size)
    parallel = ParallelConfig(tp=tp, pp=1, dp=size // tp, rollout_tp=tp)
    nodes, group = IdleNodes(-(-size // tp), tp), MeasuredGroup(size)
    kwargs = {"parallel": parallel, "topology": [(f"node{rank // tp}",) for rank in range(size)]}
    with tempfile.TemporaryDirectory() as folder:
        try:
            await group.start_on(nodes, kwargs, Path(folder), options.timeout)
            driver = Driver(group, parallel, options.samples, options.tokens)
            await driver.begin()
            await driver.measure_idle_calls(options.repeats)
            for number in range(1, options.steps + 1):
                with group.measure("step"):
                    await driver.step(number)
            return {
                "costs": group.costs,
                "num_connections": len(group.connections),
                "num_tokens": driver.num_tokens,
                "memory": memory(await group.call("pid")),
            }
        finally:
            await group.close()
            await nodes.close()


def memory(ranks: Sequence[int]) -> dict[str, int]:
    """Return bytes: the driver's peak, the largest resident set of a rank, and two means over ranks.

    `rank_private` counts the pages that a rank has alone. `rank_pss` adds its share of common pages.
    """
    driver = _kibibytes("/proc/self/status", "VmHWM")
    proportional = [_kibibytes(f"/proc/{pid}/smaps_rollup", "Pss") for pid in ranks]
    private = [_kibibytes(f"/proc/{pid}/smaps_rollup", "Private_Dirty") for pid in ranks]
    resident = [_kibibytes(f"/proc/{pid}/smaps_rollup", "Rss") for pid in ranks]
    return {
        "driver_peak": driver << 10,
        "rank_rss": max(resident) << 10,
        "rank_pss": sum(proportional) // len(proportional) << 10,
        "rank_private": sum(private) // len(private) << 10,
    }


def _kibibytes(path: str, name: str) -> int:
    (line,) = [line for line in Path(path).read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1])


def lines(options: argparse.Namespace, measurements: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the JSON lines."""
    size, costs, num_agents = options.ranks, measurements["costs"], measurements["num_connections"]
    where: dict[str, Any] = {"machine": machine(), "versions": versions()}
    idle_call = f"CPU of the driver in a call of {size} ranks that do nothing, behind {num_agents} agents"
    tokens = f"{options.samples} samples, {measurements['num_tokens']} tokens, to the first rank of each replica"

    def line(metric: str, values: Sequence[float], unit: str, against: str) -> dict[str, Any]:
        return metric_line(metric, values, unit, target=LIMITS.get(metric), against=against, digits=3, **where)

    steps = costs["step"]
    all_lines = [
        line("driver_cpu_per_call", [1e3 * cost.cpu for cost in costs["call"]], "ms", idle_call),
        line("driver_cpu_of_rows", [cost.cpu for cost in costs["step.update"]], "s", tokens),
        line("driver_cpu_of_start", [costs["start"][0].cpu], "s", f"connect, fork, introduce, construct {size} ranks"),
        line("driver_cpu_of_step", [cost.cpu for cost in steps], "s", tokens),
        line("driver_bytes_of_step", [cost.sent + cost.received for cost in steps], "bytes", tokens),
    ]
    for name, num_bytes in measurements["memory"].items():
        all_lines.append(line(f"memory_{name}", [num_bytes], "bytes", "after the last step"))
    return all_lines


def table(all_costs: Mapping[str, Sequence[Cost]]) -> str:
    """Return a table of the calls, each with the median of its repeats."""
    rows = [
        f"{'':16} {'CPU ms':>9} {'ms a message':>13} {'wall ms':>9} {'messages':>9} {'sent MB':>9} {'received MB':>12}"
    ]
    for name, costs in sorted(all_costs.items()):
        cost = sorted(costs, key=lambda cost: cost.cpu)[len(costs) // 2]
        per_rank = 1e3 * cost.cpu / cost.messages if cost.messages else 0.0
        rows.append(
            f"{name:16} {1e3 * cost.cpu:9.2f} {per_rank:13.4f} {1e3 * cost.wall:9.1f} {cost.messages:9} "
            f"{cost.sent / 1e6:9.2f} {cost.received / 1e6:12.2f}"
        )
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--per-node", type=int, default=8, help="ranks of a node, which are one replica")
    parser.add_argument("--samples", type=int, default=512, help="completions of a step")
    parser.add_argument("--tokens", type=int, default=8192, help="mean tokens of prompt and completion")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=20, help="of the calls that do nothing")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that the ranks may take to start")
    parser.add_argument("--no-limits", action="store_true", help="exit with 0 whatever was measured")
    options = parser.parse_args(arguments)
    measurements = asyncio.run(measure(options))
    all_lines = lines(options, measurements)
    for line in all_lines:
        print_line(line)
    print(table(measurements["costs"]), flush=True)
    return int(not options.no_limits and any(line["met"] is False for line in all_lines))


if __name__ == "__main__":
    sys.exit(main())
