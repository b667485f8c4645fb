"""One rank's part of a vLLM engine: samples for a limited time, then returns control to the rank."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megarl import faults
from megarl.config import RolloutConfig
from megarl.groups.backends import HOST_ONLY
from megarl.platform import compile_cache, device, libraries
from megarl.platform.imports import unfreeze_disabled
from megarl.platform.memory import engine_pools
from megarl.platform.spans import span
from megarl.tracking.metrics import Max, Mean, Metric, Sum
from megarl.types import Completion, Request

libraries.prepare_vllm()

from vllm.distributed import parallel_state  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402

from megarl.engine import full_tensors  # noqa: E402
from megarl.engine.executor import CommandChannel, LeaderExecutor, follow_leader, start_worker  # noqa: E402
from megarl.engine.leader_requests import LeaderRequests  # noqa: E402
from megarl.engine.parts.choice import EngineFeatures, build_parts  # noqa: E402
from megarl.engine.parts.engine_part import EnginePart  # noqa: E402
from megarl.engine.progress import Progress  # noqa: E402
from megarl.engine.random_state import preserved_random_state  # noqa: E402
from megarl.engine.sleep import EngineSleep  # noqa: E402
from megarl.engine.vllm_arguments import engine_arguments, engine_config, name_refused_field  # noqa: E402
from megarl.tracking.metric_rows import MetricRow  # noqa: E402

METRICS = (
    MetricRow(
        "memory/kv_usage", "share", "peak fraction of the KV cache in use; maximum over the step and all engines"
    ),
    MetricRow(
        "perf/preemptions",
        "count",
        "number of preemptions: with a full KV cache, a running request loses its blocks and is recomputed",
    ),
    MetricRow("perf/steps_ahead", "share", "fraction of engine steps started before the previous output was read"),
)

Part = TypeVar("Part", bound=EnginePart)


class RolloutEngine:
    """A vLLM engine (replica) over `config.tp` consecutive ranks, in the same processes as the trainer.

    The constructor is a collective over the world: all ranks create all replicas together. Call each method on all
    ranks of a replica. Only requests passed to the leader, the replica's first rank, are sampled.

    `weight_version` is the version of the live weights. `model` is this rank's live vLLM module, `replica` the number
    of the engine.
    """

    def __init__(
        self,
        model_path: str,
        config: RolloutConfig,
        *,
        max_model_len: int,
        dtype: str,
        seed: int,
        override: Mapping[str, Any] | None = None,
        features: EngineFeatures | None = None,
        stall_seconds: float = 300.0,
    ) -> None:
        """Build the engine with dummy weights. `max_model_len` is in tokens.

        TimeoutError is raised after `stall_seconds` without a new token for unfinished requests. `override` replaces
        fields of the model's config.json. `features` are settings outside `config`. Raises ConfigError for settings
        that vLLM refuses.
        """
        # Set the cache folder first: vLLM reads its environment variables once, while the engine is built.
        compile_cache.use_folder_of_device()
        self._parts = list(build_parts(model_path, config, override, features or EngineFeatures()))
        for part in self._parts:
            part.prepare()
        libraries.check_vllm_build()
        name_field_on = functools.partial(name_refused_field, config, max_model_len, self._parts)
        with name_field_on(ValueError, TypeError, AssertionError, KeyError):
            arguments = engine_arguments(
                model_path,
                config,
                max_model_len=max_model_len,
                dtype=dtype,
                seed=seed,
                override=override,
                parts=self._parts,
            )
        # Each replica (engine) has `tp` consecutive ranks. The first one leads.
        rank = dist.get_rank()
        self.replica = rank // config.tp
        self.is_leader = rank % config.tp == 0
        self.weight_version = 0
        self._progress = Progress(stall_seconds)
        self._channel = _open_channel(config.tp)
        # During construction vLLM reseeds the global generators. The trainer's random state must not change.
        with preserved_random_state():
            with name_field_on(ValueError, TypeError, AssertionError, KeyError):
                vllm_config = engine_config(arguments, config, self._parts)
            with name_field_on(ValueError, NotImplementedError):
                self._build_worker(vllm_config)
        self.model: torch.nn.Module = self._worker.get_model()
        for part in self._parts:
            self.model = part.wrap_model(self._worker, self.model)
        self._sleep = EngineSleep(self._worker, self.model, self._parts, can_sleep=arguments.enable_sleep_mode)

    def _build_worker(self, vllm_config: Any) -> None:
        """Build this rank's worker and the optional parts.

        The leader builds vLLM's engine; followers serve its commands meanwhile.
        """
        engine_pools.allow_free_while_asleep()
        self._worker = start_worker(vllm_config, device.current().index or 0)
        engine_pools.move_constants()
        for part in self._parts:
            part.build(self._worker, is_leader=self.is_leader)
        self._requests: LeaderRequests | None = None
        if self.is_leader:
            self._requests = LeaderRequests(self._start_engine(vllm_config), self._parts)
            # During construction the engine commanded the followers (cache sizes, warm-up). Release them now.
            self._channel.release()
        else:
            follow_leader(self._worker, self._channel)
        for part in self._parts:
            part.activate(self._worker)

    def _start_engine(self, vllm_config: Any) -> LLMEngine:
        """Build vLLM's engine on the leader, around its worker, and connect the parts to its scheduler."""
        executor_class = functools.partial(
            LeaderExecutor, worker=self._worker, channel=self._channel, parts=self._parts
        )
        engine = LLMEngine(vllm_config, cast(Any, executor_class), log_stats=False)
        client = cast(Any, engine.engine_core)
        # vLLM 0.32 shuts the engine down when its client is deleted. Only `close` should, as in 0.30.
        if finalizer := getattr(client, "_finalizer", None):
            finalizer.detach()
        core = client.engine_core
        self._executor: LeaderExecutor = core.model_executor
        self._executor.kv_usage = core.scheduler.get_kv_cache_usage
        for part in self._parts:
            part.start(core.scheduler)
        return engine

    def find_part(self, kind: type[Part]) -> Part | None:
        return next((part for part in self._parts if isinstance(part, kind)), None)

    def advance(
        self,
        new_requests: Sequence[Request],
        aborts: Sequence[str],
        budget_seconds: float,
        *,
        leave_after: int | None = None,
    ) -> list[Completion]:
        """Sample until `leave_after` requests are finished, none is left, or `budget_seconds` are over.

        Returns the completions finished in this call; ranks other than the leader return an empty list. An aborted
        request returns with its tokens so far. Unknown ids in `aborts` are ignored. If vLLM refuses a request (too
        long, empty, unknown token), it returns with finish reason `error` and the cause. Before the return, the outputs
        of all started steps are read. So the caller may write weights and release memory. Raises TimeoutError if vLLM
        schedules no request for `stall_seconds`; the rank then counts as lost.
        """
        faults.reach("sample")
        with preserved_random_state():
            if self._requests is None:
                follow_leader(self._worker, self._channel)
                return []
            try:
                deadline = time.monotonic() + budget_seconds
                return self._run_steps(self._requests, new_requests, aborts, deadline, leave_after)
            finally:
                self._channel.release()

    def sampled_so_far(self) -> dict[str, int]:
        """Return the number of sampled tokens of each unfinished request by id; empty on followers."""
        running_requests = {} if self._requests is None else self._requests.running
        return {request_id: len(request.sampled.token_ids) for request_id, request in running_requests.items()}

    def prompt_logprobs(self, token_ids: NDArray[np.int64]) -> NDArray[np.float32] | None:
        """Return the log-probs of a prompt's tokens at temperature 1; None on ranks other than the leader.

        Shapes: token_ids int64 [tokens], result float32 [tokens] with 0 for the first token. Raises RuntimeError if the
        engine has another request.
        """
        with preserved_random_state():
            if self._requests is None:
                follow_leader(self._worker, self._channel)
                return None
            try:
                return self._requests.score(token_ids, self.weight_version)
            finally:
                self._channel.release()

    def metrics(self) -> dict[str, Metric]:
        """Return the engine's metrics since the last call. The leader counts for all ranks; other ranks return none."""
        if self._requests is None:
            return {}
        executor = self._executor
        metrics: dict[str, Metric] = {
            "memory/kv_usage": Max(executor.max_kv_usage),
            "perf/preemptions": Sum(float(executor.num_preempted)),
        }
        if executor.num_steps:
            metrics["perf/steps_ahead"] = Mean(executor.num_ahead / executor.num_steps, executor.num_steps)
        executor.max_kv_usage, executor.num_preempted = 0.0, 0
        executor.num_steps, executor.num_ahead = 0, 0
        for part in self._parts:
            metrics |= part.take_metrics()
        return metrics

    def load_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load full checkpoint tensors through vLLM's own loader, converted as at an engine's start.

        `tensors` are pairs of a Hugging Face name and a full tensor [any shape].
        """
        for part in self._parts:
            tensors = part.extend_tensors(tensors)
        with preserved_random_state():
            full_tensors.load(self._worker, tensors)

    def weights_updated(self, version: int | None = None) -> None:
        """Record an update of the live weights to `version` (None: the next number), and drop the KV cache.

        With rollout.recompute_kv=false running requests keep theirs.
        """
        self.weight_version = self.weight_version + 1 if version is None else version
        running_requests = () if self._requests is None else self._requests.running.values()
        for part in self._parts:
            part.update_weights(running_requests, self.weight_version)
        if not any(part.keeps_cache for part in self._parts):
            self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Drop the whole KV cache. Unfinished requests recompute theirs when they continue.

        Raises RuntimeError if a request still holds blocks of the cache.
        """
        if self._requests is not None and not self._requests.engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not reset its prefix cache: a request still holds blocks")

    def sleep(self) -> None:
        """Release the GPU memory of weights and KV cache for the trainer. On a CPU, only reset the prefix cache."""
        self.reset_prefix_cache()
        self._sleep.release_memory()

    @property
    def sleep_notices(self) -> list[str]:
        return self._sleep.notices

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Allocate the released memory of these `tags` again, at the same addresses.

        Then the weights must be written.
        """
        self._sleep.allocate_memory(tags)

    def close(self) -> None:
        """Shut the engine down, but keep torch's default process group open. A collective over the world.

        Objects in reference cycles stay in memory until the process ends. `gc.unfreeze` and `gc.collect` would free
        them, but take seconds.
        """
        # vLLM's own shutdown would also destroy the default process group.
        with unfreeze_disabled():
            self._worker.shutdown()
        del self.model, self._worker, self._requests
        parallel_state.destroy_model_parallel()
        parallel_state.get_world_group().destroy()
        parallel_state._WORLD = None
        if self._channel.group is not None:
            dist.destroy_process_group(self._channel.group)

    def _run_steps(
        self,
        requests: LeaderRequests,
        new_requests: Sequence[Request],
        aborts: Sequence[str],
        deadline: float,
        leave_after: int | None,
    ) -> list[Completion]:
        """Run engine steps until no request is left, `deadline` (monotonic seconds) passes, or `leave_after` requests
        are complete.
        """
        # Aborted and refused requests complete at once. All others run until one of the three limits.
        engine, executor = requests.engine, self._executor
        completions = [requests.abort_request(request_id) for request_id in aborts if request_id in requests.running]
        for request in new_requests:
            completions += requests.add_request(request, self.weight_version)
        sampling_began, num_steps_before = time.monotonic(), executor.num_steps
        while engine.has_unfinished_requests():
            with span("engine step"):
                outputs = engine.step()
            completions += map(requests.finish_request, outputs)
            if time.monotonic() >= deadline or (leave_after is not None and len(completions) >= leave_after):
                break
        completions += map(requests.finish_request, requests.finish_started_steps())
        # A stalled engine has unfinished requests, but scheduled no step in this call.
        is_working = executor.num_steps > num_steps_before or not engine.has_unfinished_requests()
        seconds, num_running = time.monotonic() - sampling_began, len(requests.running)
        self._progress.check_stall(seconds, is_working, num_running=num_running, kv_usage=executor.kv_usage)
        return completions


def _open_channel(tp: int) -> CommandChannel:
    first_rank = dist.get_rank() // tp * tp
    group: Any = dist.new_subgroups(tp, backend=HOST_ONLY, group_desc="engine commands")[0] if tp > 1 else None
    return CommandChannel(group, tuple(range(first_rank, first_rank + tp)))
