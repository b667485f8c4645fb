"""Nodes of one machine whose ranks compute nothing: a thousand ranks start in seconds.

The agents are megarl's own, and connect to the driver over TCP like those of a launcher on several nodes. One
interpreter without torch forks them, and each agent forks its fork server, so all processes share their imports. The
ranks answer calls with results of the size that real ranks have.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from megarl.cluster.agents.agent import connect
from megarl.cluster.agents.nodes import ConnectedNodes, too_few_nodes_error
from megarl.cluster.agents.topology import Introduction, NodeKind
from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.processes.fork_server import SERVER_MAKER, import_variables
from megarl.processes.fork_server_main import begin, fork_on_request
from megarl.processes.launcher import LaunchedProgram, python_call
from megarl.processes.process_tree import die_with, fork_child
from megarl.reshard.reshard_report import ReshardReport
from megarl.tracking.metrics import Max, Mean, Metric, Sum
from megarl.tracking.outcomes import Update, UpdateOutcome
from megarl.types import Completion, Request

NUM_METRICS = 40
"""About so many metrics has an update."""
_STAGES = ("pack", "wire", "local", "unpack", "total", "verify")
_FIRST_FREE_DESCRIPTOR = 3
"""File descriptors below are standard input, output and error."""


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


class IdleNodes(ConnectedNodes):
    """Nodes on this machine, each with an agent for `ranks_per_node` ranks."""

    def __init__(self, num_nodes: int, ranks_per_node: int) -> None:
        """Create an object without agents."""
        super().__init__(NodeKind(0, num_nodes, ranks_per_node), {"OMP_NUM_THREADS": "1"}, ())
        self._forker: LaunchedProgram | None = None

    def host(self) -> str:
        return "127.0.0.1"

    async def launch(self, address: tuple[str, int], key: bytes) -> int:
        own = {"OMP_NUM_THREADS": "1", SERVER_MAKER: "tools.bench.idle_ranks:CopiedServer"}
        with (self._log_folder / self.start_log).open("ab") as log:
            self._forker = LaunchedProgram(
                python_call("tools.bench.idle_ranks:fork_agents", *map(str, (*address, os.getpid(), self.kind.nodes))),
                environment={**os.environ, **own},
                secret=f"{key.hex()}\n".encode(),
                stdout=log,
                stderr=log,
            )
        return self.kind.nodes

    async def launch_further(self, num_nodes: int, address: tuple[str, int], key: bytes) -> int:
        raise too_few_nodes_error(self.num_living + num_nodes, self.num_living)

    async def await_end(self) -> str:
        assert self._forker is not None
        return f"the interpreter that forked the agents ended with {await self._forker.wait_for_end()}"

    async def end_agents(self) -> None:
        if self._forker is not None:
            try:
                # Agents end by themselves once their connections end. They remove their temporary folders.
                await self._forker.wait_for_end()
            finally:
                self._forker.kill()


def fork_agents(host: str, port: str, driver: str, num_nodes: str) -> None:
    """Fork the agents, which connect to the driver, and wait until they end. The key arrives on standard input."""
    die_with(int(driver))
    key = bytes.fromhex(sys.stdin.readline())
    # Once for all agents, whose fork servers import it.
    importlib.import_module("megarl.cluster.ranks.rank")
    # A collection in each process would copy the memory that all share.
    gc.collect()
    gc.freeze()
    for turn in range(int(num_nodes)):
        introduction = Introduction(turn, f"node{turn}", host)
        fork_child(lambda introduction=introduction: connect((host, int(port)), key, introduction))
    for _ in range(int(num_nodes)):
        os.wait()


class CopiedServer:
    """A fork server that is a copy of its agent. It needs no interpreter and no imports of its own."""

    def __init__(
        self, environment: Mapping[str, str], path: Sequence[str], imports: Sequence[str], log: BinaryIO
    ) -> None:
        """Start the server. `path` is that of the agent, which has imported `imports` already."""
        assert set(imports) <= sys.modules.keys()
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        agent = os.getpid()
        self._exit_code: int | None = None
        with theirs:
            self.pid: int | None = fork_child(lambda: self._serve(theirs, agent, environment))
        # Readable after the end. The process is reaped by this object alone, so the id is its own.
        self._ended = os.pidfd_open(self.pid)

    def _serve(self, requests: socket.socket, agent: int, environment: Mapping[str, str]) -> None:
        """Run the server, and its ranks. Neither returns."""
        # The driver takes the end of the agent's connection for the end of the agent.
        number = requests.fileno()
        os.closerange(_FIRST_FREE_DESCRIPTOR, number)
        os.closerange(number + 1, os.sysconf("SC_OPEN_MAX"))
        signal.set_wakeup_fd(-1)
        os.environ.update(import_variables(environment))
        begin(agent, ())
        fork_on_request(requests)()

    def exit_code(self, seconds: float = 0.0) -> int | None:
        if self._exit_code is None and select.select([self._ended], [], [], seconds)[0]:
            assert self.pid is not None
            self._exit_code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._exit_code

    def kill(self) -> None:
        self.requests.close()
        if self.exit_code() is None:
            signal.pidfd_send_signal(self._ended, signal.SIGKILL)
