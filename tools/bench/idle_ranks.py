"""Rank processes that compute nothing: forked from one interpreter that has not imported torch, a thousand in seconds.

They connect to a driver as those of a launcher on several nodes do, and answer its calls with results of the size that
real ranks have.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megarl.cluster.connected import Address, ConnectedGroup, connect
from megarl.cluster.rank import leave
from megarl.cluster.topology import Introduction
from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.processes.process_tree import die_with
from megarl.reshard.reshard_report import ReshardReport
from megarl.tracking.metrics import Max, Mean, Metric, Sum
from megarl.tracking.outcomes import Update, UpdateOutcome
from megarl.types import Completion, Request

NUM_METRICS = 40
"""About so many metrics has an update."""
_STAGES = ("pack", "wire", "local", "unpack", "total", "verify")
_MAIN = "import idle_ranks; idle_ranks.main()"


@dataclass
class IdleModel:
    """What `RankModel` calls: the first rank of a replica, which is sent its rows, reports."""

    rank: int

    def forward(self, rows: Sequence[TokenBatch] | None) -> list[np.ndarray] | None:
        return None if rows is None else [np.zeros(len(row.token_ids), np.float32) for row in rows]

    def update(self, rows: Sequence[TokenBatch] | None, *_: object) -> Update:
        outcome = UpdateOutcome(applied=True, grad_norm=1.0, learning_rate=1e-3)
        if rows is None:
            return Update(outcome, {})
        kinds = Mean(float(self.rank), 4.0), Sum(1.0), Max(float(self.rank))
        metrics: dict[str, Metric] = {
            f"train/metric_{number}": kinds[number % len(kinds)] for number in range(NUM_METRICS)
        }
        return Update(outcome, metrics)


class Idle:
    """The worker of a rank."""

    def __init__(self, rank: int, world_size: int, parallel: ParallelConfig, **_: object) -> None:
        assert "torch" not in sys.modules, "a rank of this benchmark is small: it has no torch"
        self.policy = IdleModel(rank)
        self._is_leader = rank in parallel.leaders()
        self._version = 0

    def nothing(self) -> None:
        """The smallest call."""

    def pid(self) -> int:
        return os.getpid()

    def advance(
        self, work: tuple[Sequence[Request], Sequence[str]], budget_seconds: float, leave_after: int | None
    ) -> list[Completion]:
        """Complete all requests at once, with a third of the limit's tokens to all of them."""
        return [self._completion(request) for request in work[0]] if self._is_leader else []

    def _completion(self, request: Request) -> Completion:
        random = np.random.default_rng(request.seed)
        limit = request.sampling.max_new_tokens
        length = int(random.integers(limit // 3, limit + 1))
        return Completion(
            request.request_id,
            random.integers(0, 150000, length),
            -random.random(length, np.float32),
            "stop",
            np.full(length, self._version, np.int32),
        )

    def sleep_engine(self) -> None:
        """Nothing is awake."""

    def peak_tflops(self) -> None:
        """There is no device."""

    def engine_metrics(self) -> dict[str, Metric]:
        return {"rollout/preempted": Sum(0.0), "rollout/kv_cache": Max(0.5)} if self._is_leader else {}

    def reshard(self, verify: bool = False) -> ReshardReport:
        self._version += 1
        return ReshardReport(
            seconds=dict.fromkeys(_STAGES, 0.1), num_bytes=dict.fromkeys(("local", "sent", "received"), 10**9)
        )

    def plan_digest(self) -> str:
        """As ranks compare their plans."""
        return "0" * 64


class ForkedGroup(ConnectedGroup):
    """A `WorkerGroup` of such ranks on this machine, as if on nodes of `ranks_per_node`."""

    def __init__(self, world_size: int, ranks_per_node: int) -> None:
        super().__init__(world_size)
        self._ranks_per_node = ranks_per_node
        self._forker: asyncio.subprocess.Process | None = None

    @property
    def connections(self) -> list[socket.socket]:
        """What commands and answers go through: the relays' connections, and those of ranks without a relay."""
        return [*{handle.connection.socket: None for handle in self._remote_handles}]

    def host(self) -> str:
        return "127.0.0.1"

    async def launch(self, log_folder: Path, environment: Mapping[str, str], address: Address, key: bytes) -> None:
        arguments = (address[0], address[1], os.getpid(), self.world_size, self._ranks_per_node)
        with (log_folder / self.start_log).open("ab") as log:
            self._forker = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _MAIN, *map(str, arguments),
                env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
                stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log,
            )  # fmt: skip
        assert self._forker.stdin is not None
        self._forker.stdin.write(key.hex().encode() + b"\n")
        self._forker.stdin.close()

    async def await_end(self) -> str:
        assert self._forker is not None
        return f"the forked ranks ended with {await self._forker.wait()}"

    def end_processes(self) -> None:
        if self._forker is not None and self._forker.returncode is None:
            self._forker.kill()


def main() -> None:
    """Fork the ranks, which are to connect to the driver; wait for their end."""
    parser = argparse.ArgumentParser()
    for name in ("host", "port", "driver", "world_size", "per_node"):
        parser.add_argument(name, type=str if name == "host" else int)
    options = parser.parse_args()
    die_with(options.driver)
    key = bytes.fromhex(sys.stdin.readline())
    # What the ranks share is not to be copied by a collection in each of them.
    gc.collect()
    gc.freeze()
    parent = os.getpid()
    for turn in range(options.world_size):
        if os.fork() == 0:
            die_with(parent)
            node = f"node{turn // options.per_node}"
            connect((options.host, options.port), key, Introduction(turn, node, options.host))
            leave()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return
