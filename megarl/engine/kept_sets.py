"""The tokens that top-p, top-k and min-p left to sample from: recorded by vLLM's model runner, or by us beside it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput, SamplingMaskLists

from megarl.types import KeptSets


class KeptSetRecorder:
    """Adds to the outputs of vLLM's V1 model runner the masks that its V2 gives with `return_sampling_mask`.

    A token is kept if its processed log-prob, renormalised over what min-p, top-p and top-k left, is finite. They are
    read from the sampler, on the device: as a request's own log-probs they would be a Python number for each token of
    the vocabulary. Rows that none of them cuts have empty masks.
    """

    def __init__(self, sampler: Any) -> None:
        """`sampler` is the runner's, in the mode processed_logprobs."""
        truncating = sampler.topk_topp_sampler
        self._forward = truncating.forward
        truncating.forward = self._sample
        self._kept: Tensor | None = None

    def _sample(self, logits: Tensor, generators: Any, k: Tensor | None, p: Tensor | None) -> tuple[Tensor, Tensor]:
        sampled, logprobs = self._forward(logits, generators, k, p)
        # What min-p cuts off is minus infinity in the logits already.
        is_kept = logprobs.isfinite()
        self._kept = is_kept & ~is_kept.all(1, keepdim=True)
        return sampled, logprobs

    def complete(self, output: Any) -> Any:
        """The output of the step that was begun last, with the masks of the tokens sampled in it.

        One that is still on its way to the host gets them there. They are counted on the device only then, behind a
        step that was begun meanwhile: so nothing is gained by beginning it before.
        """
        kept, self._kept = self._kept, None
        if isinstance(output, AsyncModelRunnerOutput):
            return _LateOutput(output, kept)
        return _masked(output, kept)


class _LateOutput(AsyncModelRunnerOutput):
    """A step's output that has its masks once it is read."""

    def __init__(self, output: AsyncModelRunnerOutput, kept: Tensor | None) -> None:
        self._output, self._kept = output, kept

    def get_output(self) -> ModelRunnerOutput:
        return _masked(self._output.get_output(), self._kept)


def _masked(output: Any, kept: Tensor | None) -> Any:
    """The output of a step with its masks; `kept` bool [requests, vocabulary], None if all were greedy."""
    if not isinstance(output, ModelRunnerOutput) or not output.req_ids:
        return output
    if kept is None:
        kept = torch.zeros(len(output.req_ids), 0, dtype=torch.bool)
    token_ids = kept.nonzero()[:, 1].to(torch.int32).cpu().numpy()
    offsets = np.concatenate([[0], kept.sum(1).cumsum(0).cpu().numpy()])
    output.sampling_masks = SamplingMaskLists(token_ids, offsets)
    return output


def recordable(parameters: SamplingParams, vocab_size: int) -> SamplingParams:
    """The same sampling in a form that the V2 runner records: it asks for a temperature, and a top_k, above zero."""
    recorded = copy.copy(parameters)
    if recorded.temperature == 0:
        recorded.temperature, recorded.top_k, recorded.top_p = 1.0, 1, 1.0
    elif recorded.top_k <= 0:
        recorded.top_k = vocab_size
    return recorded


def kept_sets(token_ids: Sequence[int], masks: Sequence[Any], vocab_size: int) -> KeptSets | None:
    """The sets of a completion's tokens [new_tokens] from vLLM's masks; None where nothing was cut off.

    Raises RuntimeError for masks that are not those of the tokens.
    """
    if not masks:
        return None
    if len(masks) != len(token_ids):
        raise RuntimeError(f"vLLM gave {len(masks)} sampling masks with {len(token_ids)} tokens")
    parts = [np.asarray(mask if len(mask) < vocab_size else (), np.int32) for mask in masks]
    counts = np.array([len(part) for part in parts], np.int32)
    if not counts.any():
        return None
    kept = np.concatenate(parts)
    is_sampled = kept == np.repeat(np.asarray(token_ids), counts)
    if is_sampled.sum() != np.count_nonzero(counts):
        raise RuntimeError("vLLM sampled a token that is not in its sampling mask")
    return KeptSets(counts, kept)
