"""Retained tokens: the sets of tokens left to sample from after top-p, top-k and min-p.

vLLM's V2 model runner records them itself. `RetainedTokenRecorder` records them for the V1 runner.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput, SamplingMaskLists

from megarl.types import RetainedSets


class RetainedTokenRecorder:
    """Records sampling masks for vLLM's V1 model runner, equal to `return_sampling_mask` of the V2 runner.

    A mask contains the tokens with a finite processed log-prob, that is, after min-p, top-p and top-k. A request that
    may sample from the whole vocabulary has empty masks.
    """

    # Log-probs are read in the sampler, on the device. Requesting them from vLLM would create a Python number for each
    # token of the vocabulary.

    def __init__(self, sampler: Any) -> None:
        """Attach the recorder to the runner's `sampler`. Its mode must be processed_logprobs."""
        truncating = sampler.topk_topp_sampler
        self._forward = truncating.forward
        truncating.forward = self._sample
        self._kept: Tensor | None = None

    def _sample(self, logits: Tensor, generators: Any, k: Tensor | None, p: Tensor | None) -> tuple[Tensor, Tensor]:
        sampled, logprobs = self._forward(logits, generators, k, p)
        # min-p has set its removed tokens to minus infinity before this call, so one check covers all three.
        is_kept = logprobs.isfinite()
        self._kept = is_kept & ~is_kept.all(1, keepdim=True)
        return sampled, logprobs

    def complete(self, output: Any) -> Any:
        """Add the sampling masks to the output of the newest step, and return it.

        An asynchronous output gets its masks when it is read. Counting them then queues on the device behind the next
        step. Starting steps ahead therefore gains nothing with this recorder.
        """
        kept, self._kept = self._kept, None
        if isinstance(output, AsyncModelRunnerOutput):
            return _LateOutput(output, kept)
        return _masked(output, kept)


class _LateOutput(AsyncModelRunnerOutput):
    """An asynchronous output of a step that gets its sampling masks when it is read."""

    def __init__(self, output: AsyncModelRunnerOutput, kept: Tensor | None) -> None:
        self._output, self._kept = output, kept

    def get_output(self) -> ModelRunnerOutput:
        return _masked(self._output.get_output(), self._kept)


def _masked(output: Any, kept: Tensor | None) -> Any:
    """Add sampling masks to a step's output. `kept` is bool [requests, vocabulary], or None if all requests were
    greedy.
    """
    if not isinstance(output, ModelRunnerOutput) or not output.req_ids:
        return output
    if kept is None:
        kept = torch.zeros(len(output.req_ids), 0, dtype=torch.bool)
    token_ids = kept.nonzero()[:, 1].to(torch.int32).cpu().numpy()
    offsets = np.concatenate([[0], kept.sum(1).cumsum(0).cpu().numpy()])
    output.sampling_masks = SamplingMaskLists(token_ids, offsets)
    return output


def recordable(parameters: SamplingParams, vocab_size: int) -> SamplingParams:
    """Return equivalent sampling parameters with temperature and top_k above 0. vLLM's V2 runner records masks only for
    these."""
    # Greedy sampling equals top_k 1. A top_k of the whole vocabulary cuts nothing off.
    recorded = copy.copy(parameters)
    if recorded.temperature == 0:
        recorded.temperature, recorded.top_k, recorded.top_p = 1.0, 1, 1.0
    elif recorded.top_k <= 0:
        recorded.top_k = vocab_size
    return recorded


def retained_sets(token_ids: Sequence[int], masks: Sequence[Any], vocab_size: int) -> RetainedSets | None:
    """Return the sets of tokens left to sample from at each token of a completion; None if nothing was cut
    off.

    Shapes: token_ids [new_tokens], masks one array [kept_tokens] per token. Raises RuntimeError if masks and tokens do
    not match.
    """
    if not masks:
        return None
    if len(masks) != len(token_ids):
        raise RuntimeError(
            f"vLLM returned {len(masks)} sampling masks for {len(token_ids)} sampled tokens; one per token is needed"
        )
    # A mask of the whole vocabulary cuts nothing off. An empty mask stands for it everywhere else.
    parts = [np.asarray(mask if len(mask) < vocab_size else (), np.int32) for mask in masks]
    counts = np.array([len(part) for part in parts], np.int32)
    if not counts.any():
        return None
    kept = np.concatenate(parts)
    is_sampled = kept == np.repeat(np.asarray(token_ids), counts)
    if is_sampled.sum() != np.count_nonzero(counts):
        raise RuntimeError("vLLM sampled a token that is not in its sampling mask")
    return RetainedSets(counts, kept)
