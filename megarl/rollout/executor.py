"""The leader of a tensor-parallel group schedules; the other ranks of the group follow its commands.

vLLM hands every piece of work for its workers to an `Executor`. Ours runs it on the leader's own worker and broadcasts
it to the followers, who serve until they are released. So requests need to reach the leader only, at any time, and
between two calls every rank is free to train.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from vllm.platforms import current_platform
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.worker_base import WorkerWrapperBase

BLOCK_BYTES = 1 << 16


class CommandChannel:
    """Carries commands from the first rank of `ranks` to the others: one fixed broadcast each, one more if it is long.

    `group` is a gloo group of `ranks`, or None if the leader is alone.
    """

    def __init__(self, group: dist.ProcessGroup | None, ranks: tuple[int, ...]) -> None:
        self.group = group
        self.ranks = ranks

    def send(self, command: Any) -> None:
        """Leader: give all followers this command."""
        if self.group is None:
            return
        data = pickle.dumps(command, protocol=pickle.HIGHEST_PROTOCOL)
        if len(data) > BLOCK_BYTES:
            self._broadcast(BLOCK_BYTES, pickle.dumps(len(data)))
        self._broadcast(max(len(data), BLOCK_BYTES), data)

    def receive(self) -> Any:
        """Follower: wait for the next command."""
        command = self._broadcast(BLOCK_BYTES)
        return self._broadcast(command) if isinstance(command, int) else command

    def _broadcast(self, num_bytes: int, data: bytes = b"") -> Any:
        block = torch.frombuffer(bytearray(data.ljust(num_bytes)), dtype=torch.uint8)
        dist.broadcast(block, self.ranks[0], group=self.group)
        return pickle.loads(block.numpy())  # type: ignore[arg-type]

    def release(self) -> None:
        """Leader: end the followers' `serve`."""
        self.send(None)

    def gather(self, result: Any) -> list[Any]:
        """Every rank's result, in rank order, on the leader; nothing on the others."""
        if self.group is None:
            return [result]
        is_leader = dist.get_rank() == self.ranks[0]
        results: list[Any] | None = [None] * len(self.ranks) if is_leader else None
        dist.gather_object(result, results, dst=self.ranks[0], group=self.group)
        return results or []


def start_worker(vllm_config: Any, local_rank: int) -> WorkerWrapperBase:
    """This rank's vLLM worker with its part of the model; a collective over the world, whose process group it uses."""
    rank = dist.get_rank() % vllm_config.parallel_config.world_size
    worker = WorkerWrapperBase(rpc_rank=0, global_rank=rank)
    arguments = {
        "vllm_config": vllm_config,
        "local_rank": local_rank,
        "rank": dist.get_rank(),
        "distributed_init_method": "env://",
        "is_driver_worker": rank == 0,
    }
    worker.init_worker(all_kwargs=[arguments])
    worker.init_device()
    worker.load_model()
    current_platform.update_block_size_for_backend(vllm_config)
    return worker


def serve(worker: WorkerWrapperBase, channel: CommandChannel) -> None:
    """Follower: do what the leader's executor says until it releases."""
    while (command := channel.receive()) is not None:
        method, args, kwargs = command
        if method == "execute_model":
            _execute_step(worker, *args)
        elif method == "sample_tokens":
            worker.sample_tokens(*args)
        else:
            channel.gather(getattr(worker, method)(*args, **kwargs))


def _execute_step(worker: WorkerWrapperBase, scheduler_output: Any) -> Any:
    """The forward pass and, unless a grammar's mask is still to come, the sampling: one command for both."""
    output = worker.execute_model(scheduler_output)
    if output is None and not scheduler_output.has_structured_output_requests:
        output = worker.sample_tokens(None)
    return output


class LeaderExecutor(Executor):
    """Runs the engine's work on the leader's worker and, through the channel, on its followers'."""

    def __init__(self, vllm_config: Any, *, worker: WorkerWrapperBase, channel: CommandChannel) -> None:
        self.worker = worker
        self.channel = channel
        super().__init__(vllm_config)

    def _init_executor(self) -> None:
        """The worker came in ready: its start is a collective that the followers take part in."""

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """The results of all workers of the group, in rank order."""
        if not isinstance(method, str):
            raise TypeError(f"only a worker's method can be sent to followers by name, not {method!r}")
        self.channel.send((method, args, kwargs or {}))
        results = self.channel.gather(getattr(self.worker, method)(*args, **(kwargs or {})))
        return _given(results, non_block)

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """One step on all workers; the leader's output counts, all sample alike."""
        self.channel.send(("execute_model", (scheduler_output,), {}))
        return _given(_execute_step(self.worker, scheduler_output), non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """The second half of a step whose requests follow a grammar."""
        self.channel.send(("sample_tokens", (grammar_output,), {}))
        return _given(self.worker.sample_tokens(grammar_output), non_block)

    def check_health(self) -> None:
        """A lost follower ends the next collective."""

    def shutdown(self) -> None:
        """Nothing: each rank's engine closes its own worker."""


def _given(value: Any, as_future: bool) -> Any:
    """A result as vLLM wants it: arrived on the host, and in a future if asked without blocking."""
    if isinstance(value, AsyncModelRunnerOutput):
        value = value.get_output()
    if not as_future:
        return value
    future: Future[Any] = Future()
    future.set_result(value)
    return future
