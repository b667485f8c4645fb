"""A completion sampled in parts: tokens before a pause, the request for the remainder, and the joined whole."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megarl.data.token_batch import join_sets
from megarl.types import Completion, Request


def num_kept(parts: Sequence[Completion]) -> int:
    """Return the number of tokens in all parts of a completion."""
    return sum(len(part.token_ids) for part in parts)


def rest_of(request: Request, parts: Sequence[Completion]) -> Request:
    """Return the request for the remainder of a completion. Its prompt ends with the tokens sampled so far.

    The remainder gets a new seed, derived from the request's seed and the number of retained tokens. With the same seed
    it would repeat the draws of its beginning. Without retained tokens the result is the request itself.
    """
    kept = num_kept(parts)
    if not kept:
        return request
    sampled = [part.token_ids.astype(np.int32) for part in parts]
    return replace(
        request,
        prompt_token_ids=np.concatenate([request.prompt_token_ids, *sampled]),
        sampling=replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - kept),
        seed=seed_of(request.seed, kept),
        num_kept=kept,
    )


def joined(parts: Sequence[Completion]) -> Completion:
    """Return the completion made of these parts, in order. The last part says how it ended.

    Its routed experts are the last part's, whose prompt contained all earlier parts.
    """
    return replace(
        parts[-1],
        token_ids=np.concatenate([part.token_ids for part in parts]),
        rollout_logprobs=np.concatenate([part.rollout_logprobs for part in parts]),
        weight_versions=np.concatenate([part.weight_versions for part in parts]),
        kept_sets=join_sets([(len(part.token_ids), part.kept_sets) for part in parts]),
    )


def seed_of(*parts: object) -> int:
    """Return a 31-bit hash of the parts."""
    # Not `hash`: Python randomises it per process, and a resumed run must draw the same.
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1
