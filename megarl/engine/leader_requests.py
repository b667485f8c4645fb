"""The requests of a vLLM engine on its first rank."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.llm_engine import LLMEngine

from megarl.engine.parts.engine_part import EnginePart
from megarl.engine.running_request import RunningRequest
from megarl.engine.scheduler import RecordingScheduler
from megarl.engine.vllm_arguments import REASON_LENGTH, sampling_params
from megarl.types import Completion, Request


class LeaderRequests:
    """Passes requests to a vLLM engine, and makes completions of its outputs.

    `running` are the requests without a completion, by id. `parts` are the engine's optional features.
    """

    def __init__(self, engine: LLMEngine, parts: Sequence[EnginePart]) -> None:
        self.engine = engine
        self.running: dict[str, RunningRequest] = {}
        self._engine_parts = parts
        self._core: Any = cast(Any, engine.engine_core).engine_core
        self._scheduler: RecordingScheduler = self._core.scheduler

    def add_request(self, request: Request, weight_version: int) -> list[Completion]:
        """Pass a request to vLLM. Returns a completion with the error if vLLM refuses it, else an empty list.

        `weight_version` is the version of the live weights.
        """
        if request.request_id in self.running:
            raise ValueError(f"request {request.request_id} is already running; use a new id")
        try:
            # vLLM checks parameters when they are created, and everything else when the request is added.
            parameters = sampling_params(request)
            arguments = self._request_arguments(request.prompt_token_ids, parameters, weight_version, request)
            internal_id = self.engine.add_request(request.request_id, **arguments)
        except VLLMClientError as error:
            return [_refused_completion(request.request_id, re.sub(r"\s+", " ", str(error)))]
        sampled = self._scheduler.sampled[internal_id]
        self.running[request.request_id] = RunningRequest(internal_id, sampled, [(0, weight_version)])
        if request.num_retained and request.sampling.stop:
            self._continue_text(internal_id, request.prompt_token_ids[-request.num_retained :].tolist())
        return []

    def finish_request(self, output: Any) -> Completion:
        # The scheduler recorded the tokens itself, so vLLM's output lacks them.
        (finished_output,) = output.outputs
        completion = self._pop_completion(output.request_id, finished_output.finish_reason)
        completion = dataclasses.replace(completion, num_cached=output.num_cached_tokens or 0)
        for part in self._engine_parts:
            completion = part.extend_completion(completion, finished_output)
        return completion

    def abort_request(self, request_id: str) -> Completion:
        """Stop a running request, and return its completion so far."""
        internal_id = self.running[request_id].internal_id
        # vLLM 0.30 returns no output for an aborted request, so read its output state.
        state = self.engine.output_processor.request_states[internal_id]
        completion = self._pop_completion(request_id, "abort")
        for part in self._engine_parts:
            completion = part.extend_aborted(completion, state)
        self.engine.abort_request([internal_id], internal=True)
        return completion

    def finish_started_steps(self) -> list[Any]:
        """Return the outputs of steps that asynchronous scheduling has started ahead, without starting another."""
        outputs: list[Any] = []
        # A paused scheduler schedules nothing, so each step() only reads one finished step from the queue.
        self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while self._core.batch_queue:
            outputs += self.engine.step()
        self._scheduler.set_pause_state(PauseState.UNPAUSED)
        return outputs

    def score(self, token_ids: NDArray[np.int64], weight_version: int) -> NDArray[np.float32]:
        """Return the log-probs [tokens] of a prompt at temperature 1, 0 for its first token.

        `weight_version` is the version of the live weights. Raises RuntimeError if other requests are running.
        """
        if self.engine.has_unfinished_requests():
            raise RuntimeError("prompt_logprobs: the engine has unfinished requests; wait for them or abort them first")
        # vLLM samples at least one token per request. It is discarded.
        parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        internal_id = self.engine.add_request(
            "prompt_logprobs", **self._request_arguments(token_ids, parameters, weight_version)
        )
        outputs: list[Any] = []
        while self.engine.has_unfinished_requests():
            outputs += self.engine.step()
        outputs += self.finish_started_steps()
        del self._scheduler.sampled[internal_id]
        self.engine.reset_prefix_cache()
        [output] = outputs
        # vLLM returns no log-probs for the first token.
        _, *logprobs_by_token = output.prompt_logprobs
        logprobs_and_tokens = zip(logprobs_by_token, token_ids[1:].tolist(), strict=True)
        return np.array(
            [0.0, *(token_logprobs[token].logprob for token_logprobs, token in logprobs_and_tokens)], np.float32
        )

    def _request_arguments(
        self,
        token_ids: NDArray[np.integer],
        parameters: SamplingParams,
        weight_version: int,
        request: Request | None = None,
    ) -> dict[str, Any]:
        """Return the arguments of vLLM's `add_request`, extended by all parts. `request` None: a prompt to score."""
        prompt = {"type": "token", "prompt_token_ids": token_ids.tolist()}
        arguments: dict[str, Any] = {"prompt": prompt, "params": parameters}
        for part in self._engine_parts:
            part.extend_request(arguments, request, weight_version)
        return arguments

    def _pop_completion(self, request_id: str, finish_reason: str | None) -> Completion:
        running_request = self.running.pop(request_id)
        del self._scheduler.sampled[running_request.internal_id]
        return running_request.make_completion(request_id, finish_reason)

    def _continue_text(self, internal_id: str, token_ids: list[int]) -> None:
        """Make vLLM search for stop strings in the whole text of a resumed completion.

        `token_ids` are the completion's tokens so far. They are now the end of the prompt, which vLLM does not search.
        """
        text = self.engine.get_tokenizer().decode(token_ids, skip_special_tokens=True)
        state: Any = self.engine.output_processor.request_states[internal_id]
        # An incomplete character at the end decodes to U+FFFD. Drop it: vLLM appends the complete character later.
        state.detokenizer.output_text = text.rstrip("\ufffd")


def _refused_completion(request_id: str, reason: str) -> Completion:
    return Completion(
        request_id=request_id,
        token_ids=np.zeros(0, np.int64),
        rollout_logprobs=np.zeros(0, np.float32),
        finish_reason="error",
        weight_versions=np.zeros(0, np.int32),
        error=reason[:REASON_LENGTH],
    )
