"""Segments from model calls; sampled tokens are kept as they are and never tokenised again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megarl.types import Completion, Segment

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A prompt, int32 [prompt], and its completion."""

    prompt_token_ids: NDArray[np.int32]
    completion: Completion

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """Prompt and completion [prompt + new_tokens]."""
        return np.concatenate([self.prompt_token_ids.astype(np.int64), self.completion.token_ids])


def stitch(calls: Sequence[ModelCall]) -> Segment:
    """The segment of model calls each of whose prompts begins with all tokens of the call before.

    Tokens between two completions, the observations, are masked. Raises ValueError for a prompt that does not extend
    the call before, and for no calls.
    """
    if not calls:
        raise ValueError("a segment needs a model call")
    token_ids = calls[-1].token_ids
    rollout_logprobs = np.zeros(len(token_ids), np.float32)
    weight_versions = np.full(len(token_ids), -1, np.int32)
    turns = np.full(len(token_ids), -1, np.int16)
    end = 0
    for number, call in enumerate(calls):
        start = len(call.prompt_token_ids)
        if start < end:
            raise ValueError(f"model call {number} does not extend the call before: its prompt is shorter")
        end = start + len(call.completion.token_ids)
        if not np.array_equal(call.token_ids, token_ids[:end]):
            raise ValueError(f"the tokens of model call {number} are not those that the last call extends")
        rollout_logprobs[start:end] = call.completion.rollout_logprobs
        weight_versions[start:end] = call.completion.weight_version
        turns[start:end] = number
    return Segment(
        token_ids=token_ids,
        loss_mask=turns >= 0,
        rollout_logprobs=rollout_logprobs,
        weight_versions=weight_versions,
        turns=turns,
        routed_experts=calls[-1].completion.routed_experts,
    )
