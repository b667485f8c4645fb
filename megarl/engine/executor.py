"""The leader of a tensor-parallel group schedules; the other ranks of the group follow its commands.

vLLM hands every piece of work for its workers to an `Executor`. Ours runs it on the leader's own worker and broadcasts
it to the followers, who serve until they are released. So requests need to reach the leader only, at any time, and
between two calls every rank is free to train.

Under vLLM's asynchronous scheduling a step is begun before the one before it has been read: the leader gives a future
that waits for the device when it is asked, and the followers wait as late as the leader does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.platforms import current_platform
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import AsyncOutputFuture
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.worker_base import WorkerWrapperBase

from megarl.engine.kept_sets import KeptSetRecorder
from megarl.platform import signed

BLOCK_BYTES = 1 << 16


class CommandChannel:
    """Carries commands from the first rank of `ranks` to the others: one fixed broadcast each, one more if it is long.

    `group` is a gloo group of `ranks`, or None if the leader is alone. Commands are signed with the run's key and
    pickled. vLLM's own form without pickle (msgpack) does not carry them: fields of a step's command have types that
    only type checkers know, and come back as bare dictionaries.
    """

    def __init__(self, group: dist.ProcessGroup | None, ranks: tuple[int, ...]) -> None:
        self.group = group
        self.ranks = ranks
        self._commands = signed.between("engine commands", ranks) if group is not None else None

    def send(self, command: Any) -> None:
        """Leader: give all followers this command."""
        if self._commands is not None:
            signed.broadcast(self._commands, command, self.group, self.ranks[0], BLOCK_BYTES)

    def receive(self) -> Any:
        """Follower: wait for the next command. Raises ForgedMessageError for one that the leader did not sign."""
        assert self._commands is not None
        return signed.broadcast(self._commands, None, self.group, self.ranks[0], BLOCK_BYTES)

    def release(self) -> None:
        """Leader: end the followers' `serve`."""
        self.send(None)

    def gather(self, result: Any) -> list[Any]:
        """Every rank's result, in rank order, on the leader; nothing on the others."""
        if self.group is None:
            return [result]
        return signed.gather(result, self.group, to=self.ranks[0], purpose="engine results")


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
    with _without_message_queues():
        worker.init_device()
    worker.load_model()
    current_platform.update_block_size_for_backend(vllm_config)
    return worker


@contextmanager
def _without_message_queues() -> Iterator[None]:
    """Inside, vLLM's groups get no message queue: commands go through the channel.

    A queue is 24 MiB of shared memory that a killed rank leaves behind, and sockets over which pickles travel.
    """
    made = MessageQueue.create_from_process_group
    # vLLM declares that there is a queue; a group without one is what it makes for a single rank.
    MessageQueue.create_from_process_group = staticmethod(  # pyright: ignore[reportAttributeAccessIssue]
        lambda *args, **kwargs: None
    )
    try:
        yield
    finally:
        MessageQueue.create_from_process_group = made


def serve(worker: WorkerWrapperBase, channel: CommandChannel) -> None:
    """Follower: do what the leader's executor says until it releases.

    Once a step is begun the one before it is waited for, as on the leader: two steps later vLLM writes into its buffers
    again, which the device must have read by then. When this returns no step is under way.
    """
    begun: Any = None
    while (command := channel.receive()) is not None:
        method, args, kwargs = command
        if method not in ("execute_model", "sample_tokens"):
            channel.gather(getattr(worker, method)(*args, **kwargs))
            continue
        output = _execute_step(worker, *args) if method == "execute_model" else worker.sample_tokens(*args)
        if output is not None:
            _wait_for(begun)
            begun = output
    _wait_for(begun)


def _wait_for(output: Any) -> None:
    """Until the device has done the step whose output this is; nobody reads it."""
    if isinstance(output, AsyncModelRunnerOutput):
        output.get_output()


def _execute_step(worker: WorkerWrapperBase, scheduler_output: Any) -> Any:
    """The forward pass and, unless a grammar's mask is still to come, the sampling: one command for both."""
    output = worker.execute_model(scheduler_output)
    if output is None and not scheduler_output.has_structured_output_requests:
        output = worker.sample_tokens(None)
    return output


class LeaderExecutor(Executor):
    """Runs the engine's work on the leader's worker and, through the channel, on its followers'."""

    def __init__(
        self,
        vllm_config: Any,
        *,
        worker: WorkerWrapperBase,
        channel: CommandChannel,
        recorder: KeptSetRecorder | None = None,
    ) -> None:
        self.worker = worker
        self.channel = channel
        self._recorder = recorder
        self.num_preempted = 0
        """How often a running request lost its cache and was computed anew, since this was set."""
        self.max_kv_usage = 0.0
        """The largest share of the KV cache that a step had in use, since this was set."""
        self.kv_usage: Callable[[], float] = lambda: 0.0
        """The scheduler's share of the KV cache in use, once it is there."""
        self.num_steps = 0
        """How many steps were begun, since this was set."""
        self.num_ahead = 0
        """How many of them were begun before the one before had been read."""
        self._begun = _future(None)
        self._is_sampled = False
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
        future = _future(results)
        return future if non_block else future.result()

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """One step on all workers; the leader's output counts, all sample alike."""
        self.num_preempted += len(scheduler_output.preempted_req_ids or ())
        self.max_kv_usage = max(self.max_kv_usage, self.kv_usage())
        if scheduler_output.total_num_scheduled_tokens:
            self.num_steps += 1
            self.num_ahead += not self._begun.done()
        self.channel.send(("execute_model", (scheduler_output,), {}))
        output = _execute_step(self.worker, scheduler_output)
        self._is_sampled = output is not None
        return self._begin(output, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """The second half of a step whose requests follow a grammar.

        Under asynchronous scheduling vLLM asks for that of every step: the others' was done with the first half.
        """
        if self._is_sampled:
            self._is_sampled = False
            return self._begun if non_block else self._begun.result()
        self.channel.send(("sample_tokens", (grammar_output,), {}))
        return self._begin(self.worker.sample_tokens(grammar_output), non_block)

    def _begin(self, output: Any, non_block: bool) -> Any:
        self._begun = _future(output if self._recorder is None else self._recorder.complete(output))
        return self._begun if non_block else self._begun.result()

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Whether vLLM may begin a step before it has read the one before."""
        return True

    def check_health(self) -> None:
        """A lost follower ends the next collective."""

    def shutdown(self) -> None:
        """Nothing: each rank's engine closes its own worker."""


def _future(value: Any) -> Future[Any]:
    """A result as vLLM asks for it; one that is still on its way to the host is waited for when it is read."""
    if isinstance(value, AsyncModelRunnerOutput):
        return AsyncOutputFuture(value, single_value=True)
    future: Future[Any] = Future()
    future.set_result(value)
    return future
