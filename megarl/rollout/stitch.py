"""From model calls to segments: what was sampled stays the tokens that it was, and is never tokenised again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megarl.types import Completion, Segment


def single_call(prompt_token_ids: Sequence[int], completion: Completion) -> Segment:
    """The tokens [prompt + completion] of one model call."""
    num_prompt, num_sampled = len(prompt_token_ids), len(completion.token_ids)
    loss_mask = np.arange(num_prompt + num_sampled) >= num_prompt
    rollout_logprobs = np.zeros(len(loss_mask), np.float32)
    rollout_logprobs[num_prompt:] = completion.rollout_logprobs
    routed_experts = completion.routed_experts
    if routed_experts is not None:
        # The last token was sampled but never read; nothing follows it, so any experts do.
        routed_experts = np.concatenate([routed_experts, routed_experts[-1:]])
    return Segment(
        token_ids=np.concatenate([np.array(prompt_token_ids, np.int64), completion.token_ids]),
        loss_mask=loss_mask,
        rollout_logprobs=rollout_logprobs,
        weight_versions=np.where(loss_mask, completion.weight_version, -1).astype(np.int32),
        turns=np.where(loss_mask, 0, -1).astype(np.int16),
        routed_experts=routed_experts,
    )
