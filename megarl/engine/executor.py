"""vLLM's executor for tensor parallelism: the leader (first rank) schedules, the followers execute its commands.

vLLM passes all work for its workers to an `Executor`. `LeaderExecutor` runs the work on the leader's worker, and
broadcasts it to the followers. They serve commands until the leader releases them. So only the leader needs the
requests, and between two calls every rank is free to train.

With asynchronous scheduling, vLLM starts a step before it reads the previous output. The leader then returns a future.
Reading it waits for the device. The followers wait at the same point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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

from megarl.engine.parts.engine_part import EnginePart
from megarl.groups import signed

BLOCK_BYTES = 1 << 16
"""Bytes of a command's first broadcast. Longer commands need a second broadcast."""


class CommandChannel:
    """Channel for commands from an engine's leader (first rank) to its other ranks: one or two broadcasts per command.

    `group` is a gloo group of `ranks`; None: there are no followers. Commands are pickled and signed with the run's
    key.
    """

    # vLLM's own encoding (msgpack, no pickle) is not enough: it decodes some fields of a step's command as plain
    # dictionaries, because only type checkers know their types.

    def __init__(self, group: dist.ProcessGroup | None, ranks: tuple[int, ...]) -> None:
        self.group = group
        self.ranks = ranks
        self._commands = signed.channel_between("engine commands", ranks) if group is not None else None

    def send(self, command: Any) -> None:
        """Send a command to all followers. Called on the leader only."""
        if self._commands is not None:
            signed.broadcast(self._commands, command, self.group, self.ranks[0], BLOCK_BYTES)

    def receive(self) -> Any:
        """Wait for the next command.

        Called on followers only. Raises ForgedMessageError if the leader did not sign it.
        """
        assert self._commands is not None
        return signed.broadcast(self._commands, None, self.group, self.ranks[0], BLOCK_BYTES)

    def release(self) -> None:
        self.send(None)

    def gather(self, result: Any) -> list[Any]:
        """Return all ranks' results in rank order on the leader, an empty list on followers. A collective."""
        if self.group is None:
            return [result]
        return signed.gather(result, self.group, to=self.ranks[0], purpose="engine results")


def start_worker(vllm_config: Any, local_rank: int) -> WorkerWrapperBase:
    """Start this rank's vLLM worker and build its part of the model. A collective over the world."""
    rank = dist.get_rank() % vllm_config.parallel_config.world_size
    # rpc_rank is the index into `all_kwargs`. This list holds only this worker's arguments.
    worker = WorkerWrapperBase(rpc_rank=0, global_rank=rank)
    arguments = {
        "vllm_config": vllm_config,
        "local_rank": local_rank,
        "rank": dist.get_rank(),
        # Not used: the world's process group exists already.
        "distributed_init_method": "env://",
        "is_driver_worker": rank == 0,
    }
    worker.init_worker(all_kwargs=[arguments])
    with _without_message_queues():
        worker.init_device()
    worker.load_model()
    # The block size depends on the attention backend, which is known only once the model is built.
    current_platform.update_block_size_for_backend(vllm_config)
    return worker


@contextmanager
def _without_message_queues() -> Iterator[None]:
    """Let vLLM create process groups without message queues, because `CommandChannel` sends commands."""
    # vLLM 0.30's queue takes 24 MiB of shared memory, sends pickles over sockets, and stays behind after a kill.
    create_group_with_queue = MessageQueue.create_from_process_group
    # vLLM's annotations require a queue, but its code handles None: a group of one rank has none.
    MessageQueue.create_from_process_group = staticmethod(  # pyright: ignore[reportAttributeAccessIssue]
        lambda *args, **kwargs: None
    )
    try:
        yield
    finally:
        MessageQueue.create_from_process_group = create_group_with_queue


def follow_leader(worker: WorkerWrapperBase, channel: CommandChannel) -> None:
    """Execute the leader's commands on a follower, until the leader releases it. All steps are then complete."""
    # After starting a step, wait for the previous one, as the leader does. vLLM overwrites a step's buffers two steps
    # later: the device must have read them by then.
    previous_output: Any = None
    while (command := channel.receive()) is not None:
        method, args, kwargs = command
        if method not in ("execute_model", "sample_tokens"):
            channel.gather(getattr(worker, method)(*args, **kwargs))
            continue
        step_output = _execute_step(worker, *args) if method == "execute_model" else worker.sample_tokens(*args)
        if step_output is not None:
            _wait_for_output(previous_output)
            previous_output = step_output
    _wait_for_output(previous_output)


def _wait_for_output(output: Any) -> None:
    """Wait for the device if the output of a step is asynchronous. The value itself is not needed."""
    if isinstance(output, AsyncModelRunnerOutput):
        output.get_output()


def _execute_step(worker: WorkerWrapperBase, scheduler_output: Any) -> Any:
    """Run a step's forward pass, and sample unless vLLM must first send a grammar's mask."""
    # One command for both halves saves a broadcast per step.
    output = worker.execute_model(scheduler_output)
    if output is None and not scheduler_output.has_structured_output_requests:
        output = worker.sample_tokens(None)
    return output


class LeaderExecutor(Executor):
    """vLLM executor on an engine's leader. It runs work on its own worker, and commands the followers to run it."""

    def __init__(
        self,
        vllm_config: Any,
        *,
        worker: WorkerWrapperBase,
        channel: CommandChannel,
        parts: Sequence[EnginePart] = (),
    ) -> None:
        """Set up the leader's executor around a worker that has started already."""
        self.worker = worker
        self.channel = channel
        self._parts = parts
        self.num_preempted = 0
        """Number of preemptions since the last reset. A preempted request loses its KV cache and is recomputed."""
        self.max_kv_usage = 0.0
        """Largest fraction of the KV cache used by a step since the last reset."""
        self.kv_usage: Callable[[], float] = lambda: 0.0
        """Returns the used fraction of the KV cache. A placeholder until the scheduler exists."""
        self.num_steps = 0
        """Number of steps started since the last reset."""
        self.num_ahead = 0
        """Number of steps, since the last reset, that started before the previous output was read."""
        self._result_ahead = _make_future(None)
        self._is_sampled = False
        super().__init__(vllm_config)

    def _init_executor(self) -> None:
        """Do nothing: the worker was started in a collective with the followers."""

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Call a worker's method on all ranks. Returns the results in rank order, or a future with `non_block`.

        `timeout` is ignored. Raises TypeError if `method` is not a name.
        """
        if not isinstance(method, str):
            raise TypeError(
                f"collective_rpc method = {method!r}: must be the name of a worker method; functions cannot be sent "
                "to an engine's other ranks"
            )
        self.channel.send((method, args, kwargs or {}))
        results = self.channel.gather(getattr(self.worker, method)(*args, **(kwargs or {})))
        future = _make_future(results)
        return future if non_block else future.result()

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Run one step on all workers. Returns the leader's output; all ranks sample the same tokens."""
        self.num_preempted += len(scheduler_output.preempted_req_ids or ())
        self.max_kv_usage = max(self.max_kv_usage, self.kv_usage())
        # A step without tokens computes nothing, so it does not count.
        if scheduler_output.total_num_scheduled_tokens:
            self.num_steps += 1
            self.num_ahead += not self._result_ahead.done()
        self.channel.send(("execute_model", (scheduler_output,), {}))
        output = _execute_step(self.worker, scheduler_output)
        self._is_sampled = output is not None
        return self._complete_step(output, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Run the second half of a step: sampling with the masks of grammar-constrained requests.

        With asynchronous scheduling vLLM calls this for every step. Without a grammar the first half has already
        sampled, and its result is returned.
        """
        if self._is_sampled:
            self._is_sampled = False
            return self._result_ahead if non_block else self._result_ahead.result()
        self.channel.send(("sample_tokens", (grammar_output,), {}))
        return self._complete_step(self.worker.sample_tokens(grammar_output), non_block)

    def _complete_step(self, output: Any, non_block: bool) -> Any:
        for part in self._parts:
            output = part.complete_step(output)
        self._result_ahead = _make_future(output)
        return self._result_ahead if non_block else self._result_ahead.result()

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def check_health(self) -> None:
        """Do nothing: if another rank of this engine is lost, the next collective fails."""

    def shutdown(self) -> None:
        """Do nothing: each rank's engine closes its own worker."""


def _make_future(value: Any) -> Future[Any]:
    """Return a future with the result `value`. Reading an asynchronous output waits for the device."""
    if isinstance(value, AsyncModelRunnerOutput):
        return AsyncOutputFuture(value, single_value=True)
    future: Future[Any] = Future()
    future.set_result(value)
    return future
