"""One rank's share of a vLLM engine: sample completions for a while, then hand the rank back to its trainer."""

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

from megarl.config import RolloutConfig
from megarl.platform import compile_cache, device, vllm_on_cpu
from megarl.platform.imports import kept_frozen
from megarl.platform.spans import span
from megarl.tracking.metrics import Max, Mean, Metric, Sum
from megarl.types import Completion, ExpertsHandle, FinishReason, KeptSets, Request

vllm_on_cpu.prepare()

from vllm import SamplingParams  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.exceptions import VLLMClientError  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.core.sched.interface import PauseState  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402

from megarl.engine.arguments import REASON_LENGTH, engine_arguments, engine_config, refusals_named  # noqa: E402
from megarl.engine.executor import CommandChannel, LeaderExecutor, serve, start_worker  # noqa: E402
from megarl.engine.kept_sets import KeptSetRecorder, kept_sets, recordable  # noqa: E402

METRICS = {
    "memory/kv_usage": ("share", "the engines' KV cache in use at a time, the most of the step and of all engines"),
    "perf/preemptions": (
        "count",
        "how often a running request lost its cache, for want of room, and was computed anew",
    ),
    "perf/steps_ahead": (
        "share",
        "engine steps that were begun before the one before had been read (rollout.async_scheduling)",
    ),
}
"""Names, units and meanings, for `tracking.table`."""


_MOST_NAMED = 5
"""Loose tensors that a notice names: the same ones recur in each layer."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Running:
    """A request that runs: vLLM's own id for it, and the first token of each weight version that samples it."""

    internal_id: str
    versions: list[tuple[int, int]]


class RolloutEngine:
    """A vLLM engine spread over `config.tp` consecutive ranks, in the processes that also train.

    Making one is a collective over the world: its ranks make all replicas together. Each method is called on all ranks
    of a replica; only the leader's requests count.

    Raises ConfigError for settings that vLLM refuses.

    `weight_version` counts `weights_updated`; `model` is this rank's live vLLM module, `replica` the engine's number.
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
    ) -> None:
        """`keep_experts` takes the experts [tokens, layers, top_k] of each completion that has them.

        `override` are fields of the model's config.json with other values (`config.override`).
        With top-p, top-k or min-p in `config.sampling`, completions come with the sets of tokens that these kept.
        """
        # First, because vLLM stops reading its environment variables while the engine is built.
        compile_cache.use_own_folder()
        vllm_on_cpu.check_build()
        with refusals_named(config, max_model_len, ValueError, TypeError, AssertionError, KeyError):
            arguments = engine_arguments(
                model_path, config, max_model_len=max_model_len, dtype=dtype, seed=seed, override=override
            )
        rank = dist.get_rank()
        self.replica = rank // config.tp
        self.is_leader = rank % config.tp == 0
        self.weight_version = 0
        self._keep_experts = keep_experts
        self._can_sleep = arguments.enable_sleep_mode
        self._asleep: set[str] = set()
        self._running: dict[str, _Running] = {}
        self._keeps_kv = not config.recompute_kv
        self._channel = _open_channel(config.tp)
        with preserved_random_state():
            with refusals_named(config, max_model_len, ValueError, TypeError, AssertionError, KeyError):
                vllm_config = engine_config(arguments, config)
                self._records_sets = config.sampling.is_truncated
                self._has_masks: bool = vllm_config.model_config.return_sampling_mask
                self._vocab_size: int = vllm_config.model_config.get_vocab_size()
            with refusals_named(config, max_model_len, ValueError, NotImplementedError):
                self._start(vllm_config)
        self.model: torch.nn.Module = self._worker.get_model()
        loose = loose_tensors(self.model)
        self._sleep_level = 1 if loose else 2
        self.sleep_notices = [kept_weights_notice(self.model, loose)] if loose and self._can_sleep else []
        """Notices for the user of an engine that sleeps."""

    def _start(self, vllm_config: Any) -> None:
        self._worker = start_worker(vllm_config, device.current().index or 0)
        self._engine: LLMEngine | None = None
        if self.is_leader:
            recorder = None
            if self._records_sets and not self._has_masks:
                recorder = KeptSetRecorder(cast(Any, self._worker).model_runner.sampler)
            executor_class = functools.partial(
                LeaderExecutor, worker=self._worker, channel=self._channel, recorder=recorder
            )
            self._engine = LLMEngine(vllm_config, cast(Any, executor_class), log_stats=False)
            core = cast(Any, self._engine.engine_core).engine_core
            self._executor: LeaderExecutor = core.model_executor
            self._executor.kv_usage = core.scheduler.get_kv_cache_usage
            if recorder is not None:
                # Only now: vLLM's own check of its configs would refuse it.
                core.scheduler.return_sampling_mask = True
            self._channel.release()
        else:
            serve(self._worker, self._channel)

    def advance(
        self,
        new_requests: Sequence[Request],
        aborts: Sequence[str],
        budget_seconds: float,
        *,
        leave_after: int | None = None,
    ) -> list[Completion]:
        """Sample until `leave_after` requests finished, nothing is unfinished or the budget has passed.

        Returns what finished in this call. An aborted request comes back with the tokens it has; an id that is not
        running is passed over. A request that vLLM refuses (too long, empty, an unknown token) comes back with the
        finish reason `error` and why; the others go on. Followers return nothing, when their leader does.

        No step is under way when this returns: what vLLM has begun ahead is read, so that weights may then be written
        and memory given away.
        """
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
        """How many tokens each unfinished request has, by id, between two calls of `advance`; none on followers."""
        return {name: len(self._tokens_so_far(running)) for name, running in self._running.items()}

    def prompt_logprobs(self, token_ids: NDArray[np.int64]) -> NDArray[np.float32] | None:
        """Log-probs of a prompt's tokens at temperature 1: float32 [tokens], the first one zero; None on followers.

        Called on all ranks of a replica, when it has no other request; nothing of the prompt stays in the cache.
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
        """Of the requests since the call before; nothing on followers, whose cache is the leader's."""
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
        return found

    def load_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load full checkpoint tensors through vLLM's own loader, converted as at its start. All ranks of a replica."""
        with preserved_random_state():
            self._worker.reload_weights(weights_iterator=tensors)

    def weights_updated(self, version: int | None = None) -> None:
        """Say that the live weights were rewritten: nothing computed with the old ones is reused.

        But under rollout.recompute_kv false, by what is running. `version` is theirs, the next one unless given.
        """
        self.weight_version = self.weight_version + 1 if version is None else version
        if not self._keeps_kv:
            self.reset_prefix_cache()
            return
        # Requests that begin later have another salt, which parts them from what the cache holds.
        for running in self._running.values():
            if self._has_begun(running):
                running.versions.append((len(self._tokens_so_far(running)), self.weight_version))
            else:
                running.versions[:] = [(0, self.weight_version)]

    def reset_prefix_cache(self) -> None:
        """Forget all cached keys and values; those of unfinished requests are computed anew when they go on."""
        if self._engine is not None and not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM kept its prefix cache: some request still holds blocks")

    def sleep(self) -> None:
        """Give the memory of weights and KV cache back to the trainer; on CPU nothing is given.

        The weights' contents are lost, unless the model holds tensors that vLLM would not bring back: then all of it
        is kept in host memory.
        """
        self.reset_prefix_cache()
        if self._can_sleep and not self._asleep:
            self._worker.sleep(level=self._sleep_level)
            self._asleep = {"weights", "kv_cache"}

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take memory again where it was given, at the same addresses; the weights must then be written."""
        if given := self._asleep.intersection(tags):
            self._worker.wake_up(tags=sorted(given))
            self._asleep -= given

    def close(self) -> None:
        """End the engine; the world's process group stays. A collective over the world.

        What lies in cycles goes with the process, or with `gc.unfreeze` and `gc.collect`, which take seconds.
        """
        # Not through the engine's own shutdown: it would destroy the default process group too.
        with kept_frozen():
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
        while engine.has_unfinished_requests():
            with span("engine step"):
                outputs = engine.step()
            completions += (self._finish(output) for output in outputs)
            if time.monotonic() >= deadline or (leave_after is not None and len(completions) >= leave_after):
                break
        completions += (self._finish(output) for output in self._read_begun(engine))
        return completions

    def _read_begun(self, engine: LLMEngine) -> list[Any]:
        """The outputs of the steps that asynchronous scheduling has begun ahead; no other is begun."""
        core = cast(Any, engine.engine_core).engine_core
        outputs: list[Any] = []
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while core.batch_queue:
            outputs += engine.step()
        core.scheduler.set_pause_state(PauseState.UNPAUSED)
        return outputs

    def _score(self, engine: LLMEngine, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        if engine.has_unfinished_requests():
            raise RuntimeError("a prompt is scored only when the engine has no other request")
        prompt: Any = {"type": "token", "prompt_token_ids": token_ids.tolist()}
        parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        engine.add_request("prompt_logprobs", prompt, self._recorded(parameters))
        outputs: list[Any] = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        outputs += self._read_begun(engine)
        engine.reset_prefix_cache()
        [output] = outputs
        _, *others = output.prompt_logprobs
        found = [0.0, *(at[token].logprob for at, token in zip(others, token_ids[1:].tolist(), strict=True))]
        return np.array(found, np.float32)

    def _add(self, engine: LLMEngine, request: Request) -> list[Completion]:
        """Give vLLM a request. Returns its completion if vLLM refuses it, else nothing."""
        if request.request_id in self._running:
            raise ValueError(f"request {request.request_id} is running already")
        prompt: Any = {"type": "token", "prompt_token_ids": request.prompt_token_ids.tolist()}
        if self._keeps_kv:
            prompt["cache_salt"] = self._cache_salt
        try:
            internal_id = engine.add_request(request.request_id, prompt, self._recorded(sampling_params(request)))
        except VLLMClientError as error:
            return [_refused(request.request_id, re.sub(r"\s+", " ", str(error)))]
        self._running[request.request_id] = _Running(internal_id, [(0, self.weight_version)])
        if request.num_kept and request.sampling.stop:
            _continue_text(engine, internal_id, request.prompt_token_ids[-request.num_kept :].tolist())
        return []

    def _recorded(self, parameters: SamplingParams) -> SamplingParams:
        return recordable(parameters, self._vocab_size) if self._has_masks else parameters

    def _finish(self, output: Any) -> Completion:
        (sampled,) = output.outputs
        versions = self._running.pop(output.request_id).versions
        masks = sampled.sampling_mask.token_ids if sampled.sampling_mask else ()
        kept = kept_sets(sampled.token_ids, masks, self._vocab_size)
        done = _completion(
            output.request_id, sampled.token_ids, sampled.logprobs, sampled.finish_reason, versions, kept
        )
        done = dataclasses.replace(done, num_cached=output.num_cached_tokens or 0)
        if sampled.routed_experts is None or self._keep_experts is None:
            return done
        return dataclasses.replace(done, routed_experts=self._keep_experts(sampled.routed_experts))

    def _abort(self, engine: LLMEngine, request_id: str) -> Completion:
        running = self._running.pop(request_id)
        internal_id = running.internal_id
        # vLLM gives no output for an aborted request; what it has so far stands in its output state.
        state: Any = engine.output_processor.request_states[internal_id]
        token_ids, logprobs = list(self._tokens_so_far(running)), state.logprobs_processor.logprobs
        kept = kept_sets(token_ids, [chunk.token_ids for chunk in state.sampling_mask_chunks], self._vocab_size)
        engine.abort_request([internal_id], internal=True)
        return _completion(request_id, token_ids, logprobs, "abort", running.versions, kept)

    @property
    def _cache_salt(self) -> str:
        """Parts what is computed under these weights from what the prefix cache holds of others."""
        return f"version {self.weight_version}"

    def _has_begun(self, running: _Running) -> bool:
        """Whether keys and values of a request were computed; one that still waits in vLLM gets the salt of now."""
        assert self._engine is not None
        scheduler = cast(Any, self._engine.engine_core).engine_core.scheduler
        request = scheduler.requests[running.internal_id]
        if request.num_computed_tokens > 0 or request.num_output_tokens > 0:
            return True
        request.cache_salt = self._cache_salt
        request.block_hashes.clear()
        request.update_block_hashes()
        return False

    def _tokens_so_far(self, running: _Running) -> Sequence[int]:
        assert self._engine is not None
        state: Any = self._engine.output_processor.request_states[running.internal_id]
        return state.detokenizer.output_token_ids


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Leave the generators of Python, NumPy, torch and this rank's GPU as they were: vLLM reseeds and uses them."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    here = device.current()
    with torch.random.fork_rng(devices=[here] if here.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def sampling_params(request: Request) -> SamplingParams:
    """vLLM's form of a request: its own seed, so that all ranks of a group draw alike, and sampled log-probs only."""
    sampling = request.sampling
    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        seed=request.seed,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        include_stop_str_in_output=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def loose_tensors(model: torch.nn.Module) -> list[str]:
    """Return the names of tensors that are neither parameter nor buffer: sleep level 2 would lose their contents.

    The KV cache may be lost. Scalars that attention keeps on the host are not part of what sleeps.
    """
    return [
        f"{path}.{name}".removeprefix(".")
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name != "kv_cache" and isinstance(value, torch.Tensor) and value.numel() > 0
        if not (value.is_cpu and value.dim() == 0)
    ]


def kept_weights_notice(model: torch.nn.Module, loose: Sequence[str]) -> str:
    """Return a notice for a model whose weights stay in host memory during sleep because of its loose tensors."""
    num_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    more = f" and {len(loose) - _MOST_NAMED} more" if len(loose) > _MOST_NAMED else ""
    return (
        f"a sleeping engine copies its weights to pinned host memory every step ({num_bytes / 2**30:.1f} GiB a rank), "
        f"because vLLM would not restore {', '.join(loose[:_MOST_NAMED])}{more}: neither parameters nor buffers"
    )


def _continue_text(engine: LLMEngine, internal_id: str, kept: list[int]) -> None:
    """Have a request's stop strings looked for in the text of its completion from the beginning, before the prompt's
    end.

    What a half character is decoded to does not count: the engine's own text goes on with the whole one.
    """
    state: Any = engine.output_processor.request_states[internal_id]
    state.detokenizer.output_text = engine.get_tokenizer().decode(kept, skip_special_tokens=True).rstrip("\ufffd")


def _open_channel(tp: int) -> CommandChannel:
    """This rank's command channel; a collective over the world."""
    first = dist.get_rank() // tp * tp
    group: Any = dist.new_subgroups(tp, backend="gloo")[0] if tp > 1 else None
    return CommandChannel(group, tuple(range(first, first + tp)))


def _refused(request_id: str, reason: str) -> Completion:
    nothing = np.zeros(0, np.float32)
    token_ids, versions = np.zeros(0, np.int64), np.zeros(0, np.int32)
    return Completion(request_id, token_ids, nothing, "error", versions, error=reason[:REASON_LENGTH])


def _completion(
    request_id: str,
    token_ids: Sequence[int],
    logprobs: Any,
    finish_reason: str | None,
    versions: Sequence[tuple[int, int]],
    kept: KeptSets | None,
) -> Completion:
    weight_versions = np.empty(len(token_ids), np.int32)
    for start, version in versions:
        weight_versions[start:] = version
    # Asked for no alternatives, vLLM's flat log-probs hold one entry per token: the sampled one's.
    return Completion(
        request_id=request_id,
        token_ids=np.asarray(token_ids, dtype=np.int64),
        rollout_logprobs=np.asarray(logprobs.logprobs, dtype=np.float32),
        finish_reason=cast(FinishReason, finish_reason),
        weight_versions=weight_versions,
        kept_sets=kept,
    )
