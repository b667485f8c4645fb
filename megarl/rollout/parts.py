"""A completion in parts: what a park keeps of it, the request for the rest, and the whole."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megarl.data.batch import join_sets
from megarl.types import Completion, Request


def num_kept(parts: Sequence[Completion]) -> int:
    """How many tokens the parts of a completion have together."""
    return sum(len(part.token_ids) for part in parts)


def rest_of(request: Request, parts: Sequence[Completion]) -> Request:
    """The request for what is left of a completion: its tokens so far are the end of the prompt.

    The rest has a seed of its own, a function of the request's and of the number of tokens kept: under the same seed it
    would repeat the draws of its beginning. Without tokens it is the request itself.
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
    """The completion whose parts these are, in order: the last one tells how it ended.

    Its routed experts are the last part's, whose prompt held all the others.
    """
    return replace(
        parts[-1],
        token_ids=np.concatenate([part.token_ids for part in parts]),
        rollout_logprobs=np.concatenate([part.rollout_logprobs for part in parts]),
        weight_versions=np.concatenate([part.weight_versions for part in parts]),
        kept_sets=join_sets([(len(part.token_ids), part.kept_sets) for part in parts]),
    )


def seed_of(*parts: object) -> int:
    """A 31-bit hash of the parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1
