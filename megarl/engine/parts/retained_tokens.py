"""Retained tokens: the tokens left to sample from after top-p, top-k and min-p.

vLLM's V2 model runner records them itself. `RetainedTokenRecorder` does so for the V1 runner.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput, SamplingMaskLists

from megarl.engine.parts.engine_part import EnginePart
from megarl.types import Completion, Request, RetainedSets


class RetainedTokens(EnginePart):
    """Part that adds the retained tokens to completions. `async_scheduling` is the recipe's choice, or None."""

    def __init__(self, async_scheduling: bool | None) -> None:
        self._async_scheduling = async_scheduling
        self._has_masks = False
        """Whether vLLM records the sampling masks itself."""
        self._vocab_size = 0
        self._recorder: RetainedTokenRecorder | None = None

    def revise_arguments(self, vllm_config: Any) -> Mapping[str, Any]:
        if vllm_config.use_v2_model_runner:
            # The V2 model runner records retained sets itself. The V1 runner does not know this setting.
            return {"return_sampling_mask": True}
        if vllm_config.scheduler_config.async_scheduling and self._async_scheduling is None:
            # With `RetainedTokenRecorder`, steps started ahead save no time (see its `complete`).
            return {"async_scheduling": False}
        return {}

    def build(self, worker: Any, *, is_leader: bool) -> None:
        model_config = worker.vllm_config.model_config
        self._has_masks, self._vocab_size = model_config.return_sampling_mask, model_config.get_vocab_size()
        if is_leader and not self._has_masks:
            self._recorder = RetainedTokenRecorder(worker.model_runner.sampler)

    def start(self, scheduler: Any) -> None:
        if self._recorder is not None:
            # Set it after the engine is built: vLLM's check of its configuration would reject it.
            scheduler.return_sampling_mask = True

    def extend_request(self, arguments: dict[str, Any], request: Request | None, weight_version: int) -> None:
        if self._has_masks:
            arguments["params"] = make_recordable(arguments["params"], self._vocab_size)

    def complete_step(self, output: Any) -> Any:
        return output if self._recorder is None else self._recorder.complete(output)

    def extend_completion(self, completion: Completion, output: Any) -> Completion:
        return self._add_retained_sets(completion, output.sampling_mask.token_ids if output.sampling_mask else ())

    def extend_aborted(self, completion: Completion, state: Any) -> Completion:
        return self._add_retained_sets(completion, [chunk.token_ids for chunk in state.sampling_mask_chunks])

    def _add_retained_sets(self, completion: Completion, masks: Sequence[Any]) -> Completion:
        sets = retained_sets(completion.token_ids, masks, self._vocab_size)
        return dataclasses.replace(completion, retained_sets=sets)


class RetainedTokenRecorder:
    """Records sampling masks for vLLM's V1 model runner, equal to `return_sampling_mask` of the V2 runner.

    A mask has the tokens with a finite log-prob after min-p, top-p and top-k. A request that may sample from the whole
    vocabulary has empty masks.
    """

    # Read log-probs on the device, in the sampler. vLLM would make a Python number of each token in the vocabulary.

    def __init__(self, sampler: Any) -> None:
        """Attach the recorder to the runner's `sampler`. Its mode must be processed_logprobs."""
        truncating_sampler = sampler.topk_topp_sampler
        self._forward = truncating_sampler.forward
        truncating_sampler.forward = self._sample_and_record
        self._is_retained: Tensor | None = None

    def _sample_and_record(
        self, logits: Tensor, generators: Any, k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        sampled, logprobs = self._forward(logits, generators, k, p)
        # min-p has already set its removed tokens to minus infinity, so one check covers all three.
        is_finite = logprobs.isfinite()
        self._is_retained = is_finite & ~is_finite.all(1, keepdim=True)
        return sampled, logprobs

    def complete(self, output: Any) -> Any:
        """Add the sampling masks to the output of the newest step, and return it.

        An asynchronous output gets its masks when it is read. The count then waits on the device for the next step, so
        starting steps ahead saves no time.
        """
        is_retained, self._is_retained = self._is_retained, None
        if isinstance(output, AsyncModelRunnerOutput):
            return _LateOutput(output, is_retained)
        return _mask_output(output, is_retained)


class _LateOutput(AsyncModelRunnerOutput):
    """An asynchronous output of a step that gets its sampling masks when it is read."""

    def __init__(self, output: AsyncModelRunnerOutput, is_retained: Tensor | None) -> None:
        self._output, self._is_retained = output, is_retained

    def get_output(self) -> ModelRunnerOutput:
        return _mask_output(self._output.get_output(), self._is_retained)


def _mask_output(output: Any, is_retained: Tensor | None) -> Any:
    """Add sampling masks to a step's output. `is_retained` is bool [requests, vocabulary]; None: all requests were
    greedy.
    """
    if not isinstance(output, ModelRunnerOutput) or not output.req_ids:
        return output
    if is_retained is None:
        is_retained = torch.zeros(len(output.req_ids), 0, dtype=torch.bool)
    token_ids = is_retained.nonzero()[:, 1].to(torch.int32).cpu().numpy()
    offsets = np.concatenate([[0], is_retained.sum(1).cumsum(0).cpu().numpy()])
    output.sampling_masks = SamplingMaskLists(token_ids, offsets)
    return output


def make_recordable(parameters: SamplingParams, vocab_size: int) -> SamplingParams:
    """Return equivalent sampling parameters for which vLLM's V2 runner records masks: temperature and top_k above 0."""
    # Greedy sampling equals top_k 1. A top_k of the whole vocabulary excludes nothing.
    equivalent = copy.copy(parameters)
    if equivalent.temperature == 0:
        equivalent.temperature, equivalent.top_k, equivalent.top_p = 1.0, 1, 1.0
    elif equivalent.top_k <= 0:
        equivalent.top_k = vocab_size
    return equivalent


def retained_sets(token_ids: NDArray[np.int64], masks: Sequence[Any], vocab_size: int) -> RetainedSets | None:
    """Return the retained tokens of each token of a completion; None: always the whole vocabulary.

    Shapes: token_ids [new_tokens], masks one array [retained_tokens] per token. Raises RuntimeError if the numbers of
    masks and tokens differ.
    """
    if not masks:
        return None
    if len(masks) != len(token_ids):
        raise RuntimeError(
            f"vLLM returned {len(masks)} sampling masks for {len(token_ids)} sampled tokens; one per token is needed"
        )
    # A mask of the whole vocabulary excludes nothing. An empty mask means the same.
    retained_by_token = [np.asarray(mask if len(mask) < vocab_size else (), np.int32) for mask in masks]
    counts = np.array([len(part) for part in retained_by_token], np.int32)
    if not counts.any():
        return None
    retained = np.concatenate(retained_by_token)
    is_sampled = retained == np.repeat(token_ids, counts)
    if is_sampled.sum() != np.count_nonzero(counts):
        raise RuntimeError("vLLM sampled a token that is not in its sampling mask")
    return RetainedSets(counts, retained)
