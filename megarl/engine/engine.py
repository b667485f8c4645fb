"""One rank's part of a vLLM engine: samples for a limited time, then returns control to the rank."""

from __future__ import annotations

import dataclasses
import functools
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megarl import faults
from megarl.config import LoraConfig, RolloutConfig
from megarl.data.prefixes import digests
from megarl.families.model_tensors import kept_prefixes
from megarl.families.shape import read_model_shape
from megarl.groups.backends import HOST_ONLY
from megarl.platform import compile_cache, device, libraries
from megarl.platform.exact import engine as exact_engine
from megarl.platform.imports import unfreeze_disabled
from megarl.platform.spans import span
from megarl.reshard.layouts.vllm_slots import AdapterSlots
from megarl.tracking.metrics import Max, Mean, Metric, Sum
from megarl.types import (
    Completion,
    ConfigError,
    ExpertsHandle,
    FinishReason,
    Request,
    RetainedSets,
    ServedAdapter,
)

libraries.prepare_vllm()

from vllm import SamplingParams  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.exceptions import VLLMClientError  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.v1.core.sched.interface import PauseState  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402

from megarl.engine import full_tensors  # noqa: E402
from megarl.engine.drafter import ModelWithDrafter, with_drafter  # noqa: E402
from megarl.engine.executor import CommandChannel, LeaderExecutor, serve, start_worker  # noqa: E402
from megarl.engine.retained_tokens import RetainedTokenRecorder, recordable, retained_sets  # noqa: E402
from megarl.engine.scheduler import RecordingScheduler, SampledTokens  # noqa: E402
from megarl.engine.vllm_arguments import (  # noqa: E402
    REASON_LENGTH,
    engine_arguments,
    engine_config,
    refusals_named,
    sampling_params,
)

METRICS = {
    "memory/kv_usage": ("share", "peak fraction of the KV cache in use; maximum over the step and all engines"),
    "perf/preemptions": (
        "count",
        "number of preemptions: with a full KV cache, a running request loses its blocks and is recomputed",
    ),
    "perf/steps_ahead": (
        "share",
        "fraction of engine steps started before the previous output was read (rollout.async_scheduling)",
    ),
}
"""Metrics reported by this module: unit and meaning by metric name. `megarl metrics` lists them."""


_MOST_NAMED = 5
"""Maximum number of tensor names listed in a notice. Every layer has tensors of the same names."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Running:
    """An unfinished request in the engine."""

    internal_id: str
    """Id of the request inside vLLM."""
    sampled: SampledTokens
    """The tokens sampled so far, and their log-probs."""
    versions: list[tuple[int, int]]
    """For each weight version that sampled tokens of the completion, in order: (index of its first token, weight
    version).
    """


class RolloutEngine:
    """A vLLM engine (replica) over `config.tp` consecutive ranks, in the same processes as the trainer.

    The constructor is a collective over the world: all ranks create all replicas together. Call each method on all
    ranks of a replica. Only the requests given to the leader, its first rank, are sampled.

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
        keep_experts: Callable[[NDArray[np.integer]], ExpertsHandle] | None = None,
        adapter: LoraConfig | None = None,
        exact_blocks: int = 0,
        served: Mapping[str, ServedAdapter] | None = None,
        stall_seconds: float = 300.0,
    ) -> None:
        """Build the engine with dummy weights. `max_model_len` is in tokens.

        `stall_seconds` is how long the engine may compute no token although requests are unfinished. `override`
        replaces fields of the model's config.json. `keep_experts` stores the routed experts [tokens, layers,
        top_k] of a completion and returns their handle. If `config.sampling` has top-p, top-k or min-p, completions
        include the sets of tokens left to sample from. With `adapter`, all requests use the LoRA adapter in the
        engine's `slots`. `served` are LoRA adapters that requests may name (`load_adapters`). With `exact_blocks` above
        0 the engine rounds as `models.exact` does, with so many blocks of a product split over ranks. Raises
        ConfigError for settings that vLLM refuses.
        """
        # First, because vLLM caches its environment variables while the engine is built.
        compile_cache.use_own_folder()
        if exact_blocks:
            exact_engine.fix_attention_order()
        libraries.check_vllm_build()
        with refusals_named(config, max_model_len, ValueError, TypeError, AssertionError, KeyError):
            arguments = engine_arguments(
                model_path,
                config,
                max_model_len=max_model_len,
                dtype=dtype,
                seed=seed,
                override=override,
                adapter=adapter,
                served=served,
            )
        rank = dist.get_rank()
        self.replica = rank // config.tp
        self.is_leader = rank % config.tp == 0
        self.weight_version = 0
        self._keep_experts = keep_experts
        self._can_sleep = arguments.enable_sleep_mode
        self._asleep: set[str] = set()
        self._stall_seconds, self._stalled_for = stall_seconds, 0.0
        self._running: dict[str, _Running] = {}
        self._keeps_kv = not config.recompute_kv
        self.slots: AdapterSlots | None = None
        """The live slots of the LoRA adapter; None without one."""
        self._adapter, self._exact_blocks = adapter, exact_blocks
        self._served = {
            name: LoRARequest(name, number, of.folder) for number, (name, of) in enumerate((served or {}).items(), 1)
        }
        self._channel = _open_channel(config.tp)
        # vLLM reseeds the global generators while it is built; the trainer's random state must not change.
        with preserved_random_state():
            with refusals_named(config, max_model_len, ValueError, TypeError, AssertionError, KeyError):
                vllm_config = engine_config(arguments, config)
                self._records_sets = config.sampling.is_truncated
                self._has_masks: bool = vllm_config.model_config.return_sampling_mask
                self._vocab_size: int = vllm_config.model_config.get_vocab_size()
            with refusals_named(config, max_model_len, ValueError, NotImplementedError):
                self._start(vllm_config)
        shape = read_model_shape(model_path, override)
        self.model: torch.nn.Module = with_drafter(self._worker, kept_prefixes(shape))
        # Sleep level 2 drops the contents of the weights. A reshard rewrites parameters and vLLM restores buffers, but
        # nothing restores other tensors. Level 1 copies everything to the host.
        unrestored = unrestored_tensors(self.model)
        # Base weights next to an adapter are sent once, so a sleep must not drop them.
        self._sleep_level = 1 if unrestored or adapter else 2
        self.sleep_notices = (
            [sleep_copies_notice(self.model, unrestored, self.slots.tensors.values() if self.slots else ())]
            if self._sleep_level == 1 and self._can_sleep
            else []
        )
        """Texts for the user about the costs of putting the engine to sleep."""

    def _start(self, vllm_config: Any) -> None:
        self._worker = start_worker(vllm_config, device.current().index or 0)
        if self._adapter is not None:
            # Before vLLM captures CUDA graphs, which hold the addresses of the slots.
            self.slots = AdapterSlots(self._worker.get_model(), self._adapter.rank)
        if self._exact_blocks:
            exact_engine.round_exactly(self._worker.get_model(), self._exact_blocks)
        self._engine: LLMEngine | None = None
        if self.is_leader:
            recorder = None
            if self._records_sets and not self._has_masks:
                recorder = RetainedTokenRecorder(cast(Any, self._worker).model_runner.sampler)
            executor_class = functools.partial(
                LeaderExecutor, worker=self._worker, channel=self._channel, recorder=recorder
            )
            self._engine = LLMEngine(vllm_config, cast(Any, executor_class), log_stats=False)
            client = cast(Any, self._engine.engine_core)
            # vLLM 0.32 shuts the engine down when its client is deleted. As in 0.30, only `close` shall do so.
            if finalizer := getattr(client, "_finalizer", None):
                finalizer.detach()
            core = client.engine_core
            self._executor: LeaderExecutor = core.model_executor
            self._scheduler: RecordingScheduler = core.scheduler
            self._executor.kv_usage = core.scheduler.get_kv_cache_usage
            # vLLM calls this for every verification of drafts, and would count only with its own statistics on.
            core.scheduler.make_spec_decoding_stats = self._executor.drafts.count
            if recorder is not None:
                # Set after the engine is built, because vLLM's check of its configuration would refuse it.
                core.scheduler.return_sampling_mask = True
            # While it is built, the engine commands the followers (cache sizes, warm-up); release them now.
            self._channel.release()
        else:
            serve(self._worker, self._channel)
        if self.slots is not None:
            # After the warm-up, at whose end vLLM removes all adapters.
            self.slots.activate(self._worker)

    def advance(
        self,
        new_requests: Sequence[Request],
        aborts: Sequence[str],
        budget_seconds: float,
        *,
        leave_after: int | None = None,
    ) -> list[Completion]:
        """Sample until `leave_after` requests are finished, none is left, or `budget_seconds` are over.

        Returns the completions finished in this call. An aborted request returns with its tokens so far. Unknown ids in
        `aborts` are ignored. A request that vLLM refuses (too long, empty, unknown token) returns with finish reason
        `error` and the cause; other requests continue. Ranks other than the first return an empty list, at the same
        time. Raises TimeoutError if vLLM schedules no request for `stall_seconds`, which counts as a lost rank.

        No step is in flight afterwards. Steps started ahead are read first, so the caller may write weights and
        release memory.
        """
        faults.reach("sample")
        with preserved_random_state():
            if self._engine is None:
                serve(self._worker, self._channel)
                return []
            try:
                deadline = time.monotonic() + budget_seconds
                return self._sample(self._engine, new_requests, aborts, deadline, leave_after)
            finally:
                self._channel.release()

    def sampled_so_far(self) -> dict[str, int]:
        """Return the number of sampled tokens of each unfinished request, by id; empty on ranks other than the
        leader.
        """
        return {name: len(running.sampled.token_ids) for name, running in self._running.items()}

    def prompt_logprobs(self, token_ids: NDArray[np.int64]) -> NDArray[np.float32] | None:
        """Return the log-probs of a prompt's tokens at temperature 1; None on ranks other than the leader.

        Shapes: token_ids int64 [tokens], result float32 [tokens] with 0 for the first token. Call it on all ranks of a
        replica. The prompt does not remain in the cache. Raises RuntimeError if the engine has another request.
        """
        with preserved_random_state():
            if self._engine is None:
                serve(self._worker, self._channel)
                return None
            try:
                return self._score(self._engine, token_ids)
            finally:
                self._channel.release()

    def metrics(self) -> dict[str, Metric]:
        """Return the engine's metrics (METRICS) since the last call. Only the leader returns any; it counts for all
        ranks."""
        if self._engine is None:
            return {}
        executor = self._executor
        found: dict[str, Metric] = {
            "memory/kv_usage": Max(executor.max_kv_usage),
            "perf/preemptions": Sum(float(executor.num_preempted)),
        }
        if executor.num_steps:
            found["perf/steps_ahead"] = Mean(executor.num_ahead / executor.num_steps, executor.num_steps)
        executor.max_kv_usage, executor.num_preempted = 0.0, 0
        executor.num_steps, executor.num_ahead = 0, 0
        return found | executor.drafts.take_metrics()

    def load_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load full checkpoint tensors through vLLM's own loader, with the same conversions as at an engine's start.

        `tensors` are pairs of a Hugging Face name and a full tensor [any shape]. Call it on all ranks of a replica.
        """
        if isinstance(self.model, ModelWithDrafter):
            tensors = self.model.passing_drafts(tensors)
        with preserved_random_state():
            full_tensors.load(self._worker, tensors)

    def load_adapters(self) -> None:
        """Load the served LoRA adapters from their folders, by vLLM's own loader. Call it after the base weights.

        Call it on all ranks of a replica. Raises ConfigError for an adapter that vLLM refuses or would apply partly.
        """
        runner = cast(Any, self._worker).model_runner
        for name, request in self._served.items():
            chosen = f"--adapter {name}={request.lora_path}"
            try:
                runner.add_lora(request)
            except (ValueError, RuntimeError, KeyError) as error:
                text = re.sub(r"\s+", " ", str(error))[:REASON_LENGTH]
                raise ConfigError(f"{chosen}: vLLM refuses it: {text}") from error
            # vLLM 0.30 loads matrices of a layer without slots, and then leaves them out without an error.
            manager = runner.lora_manager._adapter_manager
            if unused := sorted(manager.get_adapter(request.lora_int_id).loras.keys() - manager.modules.keys()):
                raise ConfigError(
                    f"{chosen}: vLLM has no slots for {unused[0]} and {len(unused) - 1} other layers; serve the model "
                    "with the adapter merged in"
                )

    def weights_updated(self, version: int | None = None) -> None:
        """Record an update of the live weights, and invalidate the KV cache computed with the old ones.

        With rollout.recompute_kv=false, running requests keep their old KV cache. `version` is the version of the new
        weights (default: the next number).
        """
        self.weight_version = self.weight_version + 1 if version is None else version
        if not self._keeps_kv:
            self.reset_prefix_cache()
            return
        # Later requests use another cache salt, so they do not reuse blocks computed with old weights.
        for running in self._running.values():
            if self._has_computed_tokens(running):
                running.versions.append((len(running.sampled.token_ids), self.weight_version))
            else:
                running.versions[:] = [(0, self.weight_version)]

    def reset_prefix_cache(self) -> None:
        """Drop all cached keys and values. Unfinished requests recompute theirs when they continue.

        Raises RuntimeError if vLLM refuses, because a request still holds blocks.
        """
        if self._engine is not None and not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not reset its prefix cache: a request still holds blocks")

    def sleep(self) -> None:
        """Release the GPU memory of weights and KV cache for the trainer. On a CPU, only reset the prefix cache.

        The weights are lost (sleep level 2). If the model has tensors not restored by vLLM (`unrestored_tensors`), all
        weights are copied to host memory instead (sleep level 1).
        """
        self.reset_prefix_cache()
        if self._can_sleep and not self._asleep:
            self._worker.sleep(level=self._sleep_level)
            self._asleep = {"weights", "kv_cache"}

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Allocate the released memory again, at the same addresses. The weights must then be written.

        `tags` selects parts: "weights", "kv_cache". Parts not asleep are ignored.
        """
        if given := self._asleep.intersection(tags):
            self._worker.wake_up(tags=sorted(given))
            self._asleep -= given

    def close(self) -> None:
        """Shut the engine down, but leave torch's default process group open. A collective over the world.

        The engine's objects in reference cycles stay in memory until the process ends, or until `gc.unfreeze` and
        `gc.collect` are called. These two calls take seconds.
        """
        # vLLM's own shutdown of the engine would also destroy the default process group.
        with unfreeze_disabled():
            self._worker.shutdown()
        del self.model, self._worker, self._engine
        parallel_state.destroy_model_parallel()
        parallel_state.get_world_group().destroy()
        parallel_state._WORLD = None
        if self._channel.group is not None:
            dist.destroy_process_group(self._channel.group)

    def _sample(
        self,
        engine: LLMEngine,
        new_requests: Sequence[Request],
        aborts: Sequence[str],
        deadline: float,
        leave_after: int | None,
    ) -> list[Completion]:
        completions = [self._abort(engine, request_id) for request_id in aborts if request_id in self._running]
        for request in new_requests:
            completions += self._add(engine, request)
        began, num_steps = time.monotonic(), self._executor.num_steps
        while engine.has_unfinished_requests():
            with span("engine step"):
                outputs = engine.step()
            completions += (self._finish(output) for output in outputs)
            if time.monotonic() >= deadline or (leave_after is not None and len(completions) >= leave_after):
                break
        completions += (self._finish(output) for output in self._finish_started_steps(engine))
        self._watch_progress(engine, time.monotonic() - began, self._executor.num_steps - num_steps)
        return completions

    def _watch_progress(self, engine: LLMEngine, seconds: float, num_steps: int) -> None:
        """Raise TimeoutError if the calls since the last computed token took `stall_seconds`.

        The newest call took `seconds`, with `num_steps` steps that computed tokens of prompts or completions.
        """
        if num_steps or not engine.has_unfinished_requests():
            self._stalled_for = 0.0
            return
        self._stalled_for += seconds
        if self._stalled_for > self._stall_seconds:
            raise TimeoutError(
                f"the engine computed no token for {self._stalled_for:.0f} s (limit: {self._stall_seconds:g} s, "
                f"in a run cluster.verb_timeout_seconds). {len(self._running)} requests are unfinished, but vLLM "
                f"schedules none of them. {self._executor.kv_usage():.0%} of the KV cache is in use"
            )

    def _finish_started_steps(self, engine: LLMEngine) -> list[Any]:
        """Return the outputs of steps started ahead by asynchronous scheduling. Start no other step."""
        core = cast(Any, engine.engine_core).engine_core
        outputs: list[Any] = []
        # A paused scheduler schedules nothing, so each call of step() only reads one step from the queue.
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while core.batch_queue:
            outputs += engine.step()
        core.scheduler.set_pause_state(PauseState.UNPAUSED)
        return outputs

    def _score(self, engine: LLMEngine, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        if engine.has_unfinished_requests():
            raise RuntimeError("prompt_logprobs: the engine has unfinished requests; wait for them or abort them first")
        prompt: Any = {"type": "token", "prompt_token_ids": token_ids.tolist()}
        # vLLM samples at least one token per request; this one is discarded.
        parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        internal_id = engine.add_request(
            "prompt_logprobs", prompt, self._with_masks(parameters), lora_request=self._lora_request()
        )
        outputs: list[Any] = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        outputs += self._finish_started_steps(engine)
        del self._scheduler.sampled[internal_id]
        engine.reset_prefix_cache()
        [output] = outputs
        _, *others = output.prompt_logprobs
        found = [0.0, *(at[token].logprob for at, token in zip(others, token_ids[1:].tolist(), strict=True))]
        return np.array(found, np.float32)

    def _add(self, engine: LLMEngine, request: Request) -> list[Completion]:
        """Pass a request to vLLM. Return a completion with the error if vLLM refuses it, else an empty list."""
        if request.request_id in self._running:
            raise ValueError(f"request {request.request_id} is already running; use a new id")
        prompt: Any = {"type": "token", "prompt_token_ids": request.prompt_token_ids.tolist()}
        if self._keeps_kv:
            prompt["cache_salt"] = self._cache_salt
        try:
            parameters = self._with_masks(sampling_params(request))
            internal_id = engine.add_request(
                request.request_id, prompt, parameters, lora_request=self._lora_request(request.sampling.adapter)
            )
        except VLLMClientError as error:
            return [_refused(request.request_id, re.sub(r"\s+", " ", str(error)))]
        sampled = self._scheduler.sampled[internal_id]
        self._running[request.request_id] = _Running(internal_id, sampled, [(0, self.weight_version)])
        if request.num_retained and request.sampling.stop:
            _continue_text(engine, internal_id, request.prompt_token_ids[-request.num_retained :].tolist())
        return []

    def _lora_request(self, served: str = "") -> LoRARequest | None:
        """Return vLLM's reference to a served adapter, or to the trained one of all requests; None without one."""
        if served:
            return self._served[served]
        return None if self.slots is None else self.slots.request

    def _with_masks(self, parameters: SamplingParams) -> SamplingParams:
        return recordable(parameters, self._vocab_size) if self._has_masks else parameters

    def _finish(self, output: Any) -> Completion:
        # vLLM's output lacks the tokens that the scheduler recorded.
        (end,) = output.outputs
        running = self._running.pop(output.request_id)
        del self._scheduler.sampled[running.internal_id]
        masks = end.sampling_mask.token_ids if end.sampling_mask else ()
        kept = retained_sets(running.sampled.token_ids, masks, self._vocab_size)
        done = _completion(output.request_id, running, end.finish_reason, kept)
        done = dataclasses.replace(done, num_cached=output.num_cached_tokens or 0)
        if end.routed_experts is None or self._keep_experts is None:
            return done
        experts = end.routed_experts
        return dataclasses.replace(done, routed_experts=self._keep_experts(experts), expert_digests=digests(experts))

    def _abort(self, engine: LLMEngine, request_id: str) -> Completion:
        running = self._running.pop(request_id)
        internal_id = running.internal_id
        # vLLM 0.30 returns no output for an aborted request. Its sampling masks so far are in its output state.
        state: Any = engine.output_processor.request_states[internal_id]
        masks = [chunk.token_ids for chunk in state.sampling_mask_chunks]
        engine.abort_request([internal_id], internal=True)
        del self._scheduler.sampled[internal_id]
        kept = retained_sets(running.sampled.token_ids, masks, self._vocab_size)
        return _completion(request_id, running, "abort", kept)

    @property
    def _cache_salt(self) -> str:
        """Salt of prefix-cache keys, different for each weight version: blocks of other versions are not reused."""
        return f"version {self.weight_version}"

    def _has_computed_tokens(self, running: _Running) -> bool:
        """Return whether keys and values of a request were computed. If not, switch the request to the new weights'
        prefix cache.
        """
        assert self._engine is not None
        scheduler = cast(Any, self._engine.engine_core).engine_core.scheduler
        request = scheduler.requests[running.internal_id]
        if request.num_computed_tokens > 0 or request.num_output_tokens > 0:
            return True
        request.cache_salt = self._cache_salt
        # Block hashes include the salt, and vLLM computed them when the request was added.
        request.block_hashes.clear()
        request.update_block_hashes()
        return False


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Context restoring the random generators of Python, NumPy, torch and this rank's GPU at its end.

    vLLM reseeds them and draws from them.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    here = device.current()
    with torch.random.fork_rng(devices=[here] if here.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def unrestored_tensors(model: torch.nn.Module) -> list[str]:
    """Return the names of tensors in a model, of any shape, that are neither parameters nor buffers.

    Sleep level 2 would lose their contents. The KV cache is left out, because it may be lost. Scalars on the host are
    left out too, because sleep does not touch host memory.
    """
    return [
        f"{path}.{name}".removeprefix(".")
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name != "kv_cache" and isinstance(value, torch.Tensor) and value.numel() > 0
        if not (value.is_cpu and value.dim() == 0)
    ]


def sleep_copies_notice(model: torch.nn.Module, unrestored: Sequence[str], slots: Iterable[torch.Tensor] = ()) -> str:
    """Return the notice that a model's weights are copied to host memory during sleep, because of these unrestored
    tensors, or of base weights sent only once.

    `slots` hold the matrices of a LoRA adapter, [any shape]; they are copied too.
    """
    num_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), *slots))
    more = f" and {len(unrestored) - _MOST_NAMED} more" if len(unrestored) > _MOST_NAMED else ""
    copied = (
        f"a sleeping engine copies its weights to pinned host memory every step ({num_bytes / 2**30:.1f} GiB a rank)"
    )
    if not unrestored:
        return f"{copied}, because lora.sync = adapter sends the base weights only once"
    return (
        f"{copied}, because vLLM would not restore {', '.join(unrestored[:_MOST_NAMED])}{more}: these are "
        "not parameters or buffers"
    )


def _continue_text(engine: LLMEngine, internal_id: str, kept: list[int]) -> None:
    """Make vLLM search for stop strings in the whole text of a resumed completion.

    `kept` are the completion's token ids so far. They end the prompt, where vLLM does not search.
    """
    # An incomplete character at the end decodes to U+FFFD. Drop it, because vLLM appends the complete character later.
    state: Any = engine.output_processor.request_states[internal_id]
    state.detokenizer.output_text = engine.get_tokenizer().decode(kept, skip_special_tokens=True).rstrip("\ufffd")


def _open_channel(tp: int) -> CommandChannel:
    """Create this rank's channel for commands within its vLLM engine. A collective over the world."""
    first = dist.get_rank() // tp * tp
    group: Any = dist.new_subgroups(tp, backend=HOST_ONLY, group_desc="engine commands")[0] if tp > 1 else None
    return CommandChannel(group, tuple(range(first, first + tp)))


def _refused(request_id: str, reason: str) -> Completion:
    nothing = np.zeros(0, np.float32)
    token_ids, versions = np.zeros(0, np.int64), np.zeros(0, np.int32)
    return Completion(request_id, token_ids, nothing, "error", versions, error=reason[:REASON_LENGTH])


def _completion(request_id: str, running: _Running, finish_reason: str | None, kept: RetainedSets | None) -> Completion:
    sampled = running.sampled
    # Each version overwrites the rest of the completion, from its first token on.
    weight_versions = np.empty(len(sampled.token_ids), np.int32)
    for start, version in running.versions:
        weight_versions[start:] = version
    return Completion(
        request_id=request_id,
        token_ids=np.asarray(sampled.token_ids, dtype=np.int64),
        rollout_logprobs=np.asarray(sampled.logprobs, dtype=np.float32),
        finish_reason=cast(FinishReason, finish_reason),
        weight_versions=weight_versions,
        retained_sets=kept,
    )
