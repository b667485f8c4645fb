"""vLLM's schedulers with short paths for decode steps, and a record of each sampled token and its log-prob.

In most steps, all requests decode one token, and none starts, ends or is preempted. vLLM 0.30 runs such a step through
code for every case, and builds an output object per token. megarl needs a completion only at its end. So these
schedulers append token and log-prob to a record per request. They notify vLLM's output processor of a request's first
and last token only. All other steps and requests use vLLM's own code. The results are the same.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from vllm import __version__ as vllm_version
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

HAS_SHORT_PATHS = vllm_version.startswith("0.30.")
"""Whether vLLM 0.30 is installed: the short paths repeat its code. Other versions use their own code."""


class SampledTokens:
    """The tokens that a request has sampled so far, with their log-probs."""

    __slots__ = (
        "all_token_ids",
        "ends_by_tokens_only",
        "logprobs",
        "max_tokens",
        "request",
        "stop_token_ids",
        "token_ids",
        "top_tokens",
    )

    def __init__(self, request: Request, max_model_len: int) -> None:
        """Read the request's limits once, because `ends_by_tokens_only` decides in each step."""
        sampling = request.sampling_params
        assert sampling is not None
        self.request = request
        self.token_ids: list[int] = request._output_token_ids
        """The sampled tokens [new_tokens]. It is vLLM's own list and grows while the request runs."""
        self.all_token_ids: list[int] = request._all_token_ids
        self.logprobs: list[float] = []
        """Log-prob of each sampled token [new_tokens]; empty if the request does not ask for log-probs."""
        self.top_tokens: list[tuple[NDArray[np.int32], NDArray[np.float32]]] = []
        """Ids and log-probs [requested number] of the most likely tokens at each position; empty: none requested."""
        self.stop_token_ids = frozenset({*(sampling.stop_token_ids or ()), sampling.eos_token_id})
        self.max_tokens = min(request.max_tokens, max_model_len - request.num_prompt_tokens)
        """Number of sampled tokens at which the request must end."""
        self.ends_by_tokens_only = (
            sampling.num_logprobs == 0
            and sampling.prompt_logprobs is None
            # To find stop strings, vLLM's output processor needs each token.
            and not sampling.stop
            and sampling.repetition_detection is None
            and not request.use_structured_output
            and not request.has_encoder_inputs
        )
        """Whether only stop tokens and limits can end this request. Then the short path can decide whether it
        continues.
        """


class RecordingScheduler(Scheduler):
    """A scheduler that records sampled tokens in `sampled`, by the request's id inside vLLM.

    The engine removes a request's entry after reading it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Decide whether megarl's shorter code may replace vLLM's in each step."""
        super().__init__(*args, **kwargs)
        self.sampled: dict[str, SampledTokens] = {}
        self._has_short_updates = (
            HAS_SHORT_PATHS
            and self.vllm_config.speculative_config is None
            and self.connector is None
            and self.ec_connector is None
            and self.num_sampled_tokens_per_step == 1
            and not self.use_pp
        )
        cache = self.kv_cache_manager
        self._block_size = cache.block_pool.hash_block_size
        # With full attention a decode step changes blocks only at their borders. Other attention also frees blocks
        # between them.
        self._is_full_attention = all(
            type(manager) is FullAttentionManager and manager.block_size == self._block_size
            for manager in cache.coordinator.single_type_managers
        )
        self._has_short_schedules = self._has_short_updates and self._is_full_attention

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if request.sampling_params is not None:
            self.sampled[request.request_id] = SampledTokens(request, self.max_model_len)
            # vLLM 0.30 searches this list once per sampled token, so make it a set.
            cast(Any, request.sampling_params).stop_token_ids = _as_set(
                tuple(request.sampling_params.stop_token_ids or ())
            )

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        decoding = self._list_decoding_requests() if self._has_short_schedules and not throttle_prefills else []
        return self._schedule_decoding(decoding) if decoding else super().schedule(throttle_prefills)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """Record the tokens of a step. Requests that simply continue take the short path, all others vLLM's."""
        num_remaining = self._record_continuing_requests(scheduler_output, model_runner_output)
        records = {request_id: self.sampled[request_id] for request_id in num_remaining if request_id in self.sampled}
        num_tokens_before = {request_id: len(sampled.token_ids) for request_id, sampled in records.items()}
        # vLLM handles the remaining requests, but must not collect log-probs: they are recorded below.
        remaining_schedule, remaining_output = copy.copy(scheduler_output), copy.copy(model_runner_output)
        remaining_schedule.num_scheduled_tokens, remaining_output.logprobs = num_remaining, None
        core_outputs = super().update_from_output(remaining_schedule, remaining_output)
        self._record_logprobs(model_runner_output, records, num_tokens_before)
        return core_outputs

    @staticmethod
    def _record_logprobs(
        model_runner_output: ModelRunnerOutput,
        records: Mapping[str, SampledTokens],
        num_tokens_before: Mapping[str, int],
    ) -> None:
        """Add the log-probs of a step's new tokens to the `records`, by request.

        `num_tokens_before` has the number of each request's sampled tokens before the step.
        """
        logprobs = model_runner_output.logprobs
        if logprobs is None:
            return
        for request_id, sampled in records.items():
            num_new = len(sampled.token_ids) - num_tokens_before[request_id]
            num_top = cast(Any, sampled.request.sampling_params).num_logprobs
            if not num_new or num_top is None:
                continue
            rows = logprobs.slice_request(model_runner_output.req_id_to_index[request_id], num_new)
            # vLLM puts the sampled token into the first column.
            sampled.logprobs += rows.logprobs[:, 0].tolist()
            if num_top:
                # Other requests of the step may ask for more columns. Copy, because a view would keep the whole arrays
                # in memory.
                columns = rows.logprob_token_ids, rows.logprobs
                ids, values = (np.array(column[:, 1 : num_top + 1]) for column in columns)
                sampled.top_tokens += zip(ids.astype(np.int32), values.astype(np.float32), strict=True)

    def _list_decoding_requests(self) -> list[Request]:
        """Return the running requests if each decodes one token in this step, else an empty list.

        Changes nothing, so vLLM's `schedule` can still be called.
        """
        # A paused scheduler, a request that could start, or too few tokens for all: vLLM's own code decides.
        has_free_slot = len(self.running) + self.num_waiting_for_streaming_input < self.max_num_running_reqs
        max_tokens_of_step = min(self.max_num_scheduled_tokens, self.scheduler_config.max_num_batched_tokens)
        if (
            self._pause_state != PauseState.UNPAUSED
            or ((self.waiting or self.skipped_waiting) and has_free_slot)
            or len(self.running) > max_tokens_of_step
        ):
            return []
        decoding_requests: list[Request] = []
        num_new_blocks, last_position = 0, self.max_model_len - 1
        for request in self.running:
            num_ahead, num_computed = request.num_output_placeholders, request.num_computed_tokens
            if num_ahead > 0 and num_computed + 2 - num_ahead >= request.num_prompt_tokens + request.max_tokens:
                # The steps already started reach the request's limit. vLLM's `schedule` has the same condition.
                continue
            if (
                len(request._all_token_ids) + num_ahead - num_computed != 1
                or num_computed >= last_position
                or request.spec_token_ids
                or request.mm_features
                or request.next_decode_eligible_step > self.current_step + 1
            ):
                return []
            decoding_requests.append(request)
            num_new_blocks += num_computed % self._block_size == 0
        cache = self.kv_cache_manager
        # Each KV cache group needs its own new block. With too few free blocks vLLM must preempt a request.
        num_groups = len(cache.coordinator.single_type_managers)
        return [] if num_new_blocks * num_groups > cache.block_pool.get_num_free_blocks() else decoding_requests

    def _schedule_decoding(self, decoding: list[Request]) -> SchedulerOutput:
        """Schedule one token of each of these requests, with the same result and changes as vLLM's `schedule`."""
        self.current_step += 1
        cache = self.kv_cache_manager
        cache.new_step_starts()
        request_ids = [request.request_id for request in decoding]
        num_computed_tokens = [request.num_computed_tokens for request in decoding]
        new_block_ids = self._allocate_blocks(decoding)
        num_scheduled_tokens = dict.fromkeys(request_ids, 1)
        all_token_ids = {} if self.use_v2_model_runner else self._list_tokens_for_v1(decoding)
        self.prefill_capacity_bound = bool(self.waiting)
        copies, retained_blocks = cache.take_kv_cache_block_copies()
        assert not copies and not retained_blocks, "only a cache hit of a new request copies a block"
        cache.take_boundary_state_offloads()
        # vLLM's `schedule` fills the same fields. No request is new, resumed, preempted or has drafts.
        output = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=request_ids,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids=all_token_ids,
                new_block_ids=new_block_ids,
                num_computed_tokens=num_computed_tokens,
                num_output_tokens=[
                    len(request._output_token_ids) + request.num_output_placeholders for request in decoding
                ],
            ),
            num_scheduled_tokens=num_scheduled_tokens,
            total_num_scheduled_tokens=len(decoding),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=cache.get_num_common_prefix_blocks(self.running[0].request_id),
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=self.encoder_cache_manager.get_freed_mm_hashes(),
            preempted_req_ids=self.reset_preempted_req_ids,
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
            num_spec_tokens_to_schedule=self.num_spec_tokens,
            ec_manager_metadata=self.encoder_cache_manager.get_manager_metadata(),
        )
        if self.defer_block_free:
            self.sched_step_seq += 1
        self._update_after_schedule(output)
        return output

    def _allocate_blocks(self, decoding: list[Request]) -> list[tuple[list[int], ...] | None]:
        """Allocate KV cache blocks for the requests that begin or complete a block.

        Return each request's new blocks.
        """
        block_size = self._block_size
        new_block_ids: list[tuple[list[int], ...] | None] = [None] * len(decoding)
        for index, request in enumerate(decoding):
            num_computed = request.num_computed_tokens
            # The first token in a block needs the block. The last one completes it.
            if num_computed % block_size == 0 or (num_computed + 1) % block_size == 0:
                blocks = self.kv_cache_manager.allocate_slots(
                    request, 1, num_lookahead_tokens=self.num_lookahead_tokens
                )
                assert blocks is not None, "the free blocks were counted"
                new_block_ids[index] = blocks.get_block_ids(allow_none=True)
        return new_block_ids

    def _list_tokens_for_v1(self, decoding: list[Request]) -> dict[str, list[int]]:
        """Return all tokens of each request that was not in the previous step: the V1 model runner needs them."""
        ids_of_previous_step = self.prev_step_scheduled_req_ids
        all_token_ids = {
            request.request_id: request.all_token_ids.copy()
            for request in decoding
            if request.request_id not in ids_of_previous_step
        }
        ids_of_previous_step.clear()
        ids_of_previous_step.update(request.request_id for request in decoding)
        return all_token_ids

    def _takes_short_path(self, model_runner_output: ModelRunnerOutput) -> bool:
        """Return whether a step's output has nothing that needs vLLM's own code for all requests."""
        logprobs = model_runner_output.logprobs
        return (
            self._has_short_updates
            # Sampling masks and routed experts need vLLM's output processor for each token.
            and not self.return_sampling_mask
            and not self.enable_return_routed_experts
            and logprobs is not None
            and logprobs.cu_num_generated_tokens is None
            and not model_runner_output.num_nans_in_logits
            and model_runner_output.kv_connector_output is None
            and bool(model_runner_output.sampled_token_ids)
        )

    def _record_continuing_requests(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[str, int]:
        """Record the tokens of requests that decoded one token and continue.

        Returns the number of scheduled tokens of each remaining request, for vLLM's `update_from_output`.
        """
        num_scheduled, logprobs = scheduler_output.num_scheduled_tokens, model_runner_output.logprobs
        if logprobs is None or not self._takes_short_path(model_runner_output):
            return num_scheduled
        # A request stays with vLLM's own code unless it certainly continues.
        num_remaining: dict[str, int] = {}
        token_ids, row_of_request = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
        sampled_logprobs = logprobs.logprobs[:, 0].tolist()
        sampled_by_request, block_size, is_ahead = self.sampled, self._block_size, isinstance(self, AsyncScheduler)
        running_status = RequestStatus.RUNNING
        for request_id, num_tokens in num_scheduled.items():
            sampled = sampled_by_request.get(request_id)
            if sampled is None or not sampled.ends_by_tokens_only or num_tokens != 1:
                num_remaining[request_id] = num_tokens
                continue
            request, row = sampled.request, row_of_request[request_id]
            new_token_ids = token_ids[row]
            if (
                len(new_token_ids) != 1
                or new_token_ids[0] in sampled.stop_token_ids
                or len(sampled.token_ids) + 1 >= sampled.max_tokens
                # The first token reports the hits of the prefix cache.
                or request.prefill_stats is not None
                or request.num_stale_output_tokens
                or request.status is not running_status
            ):
                num_remaining[request_id] = num_tokens
                continue
            # The rest of the loop repeats what vLLM's `update_from_output` does for a request that continues.
            request.num_in_flight_tokens -= 1
            sampled.token_ids.append(new_token_ids[0])
            sampled.all_token_ids.append(new_token_ids[0])
            sampled.logprobs.append(sampled_logprobs[row])
            if len(sampled.all_token_ids) % block_size == 0:
                request.update_block_hashes()
            if is_ahead:
                request.num_output_placeholders -= 1
                num_known = request.num_computed_tokens - request.num_output_placeholders
                if num_known % block_size == 0 or not self._is_full_attention:
                    self.kv_cache_manager.cache_blocks(request, num_known)
        return num_remaining


class RecordingAsyncScheduler(RecordingScheduler, AsyncScheduler):
    """`RecordingScheduler` for asynchronous scheduling."""


@functools.lru_cache(maxsize=64)
def _as_set(token_ids: tuple[int, ...]) -> frozenset[int]:
    return frozenset(token_ids)
