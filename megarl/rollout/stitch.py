"""Training segments built from model calls. Sampled tokens are used as they are, never tokenised again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from megarl.data.token_batch import join_retained
from megarl.types import Completion, RetainedSets, Segment

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A model call: a prompt, int32 [prompt], and its completion."""

    prompt_token_ids: NDArray[np.int32]
    completion: Completion

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """Tokens of prompt and completion, int64 [prompt + new_tokens]."""
        return np.concatenate([self.prompt_token_ids.astype(np.int64), self.completion.token_ids])


@dataclass(slots=True)
class Chain:
    """Consecutive model calls. Each prompt begins with all tokens of the previous call.

    `numbers` are the calls' indices. `num_tokens` and `digest` (a hash) describe all tokens up to the last call's end.
    """

    numbers: list[int]
    num_tokens: int
    digest: bytes


def stitch(calls: Sequence[ModelCall], trained: Sequence[int] | None = None) -> tuple[Segment, ...]:
    """Merge model calls into training segments, in the order of their first calls.

    Each sampled token is trained in exactly one segment.

    `trained` are the indices of the calls to train, in ascending order; None: all. Other calls serve only as context.

    A call extends the segment that is the longest prefix of its prompt. Tokens between two completions (observations)
    are masked. If no segment is a prefix, the call opens a new segment with its whole prompt masked. This happens after
    a rewritten history, or if another call already extended the segment that would match. Raises
    ValueError without calls.
    """
    if not calls:
        raise ValueError("no model calls were given; a segment needs at least one")
    chains: list[Chain] = []
    for call_index in range(len(calls)) if trained is None else trained:
        call = calls[call_index]
        token_ids = call.token_ids
        extended_chain = longest_prefix(chains, token_ids[: len(call.prompt_token_ids)])
        if extended_chain is None:
            extended_chain = Chain([], 0, b"")
            chains.append(extended_chain)
        extended_chain.numbers.append(call_index)
        extended_chain.num_tokens = len(token_ids)
        extended_chain.digest = blake2b(token_ids.tobytes()).digest()
    return tuple(_make_segment(calls, chain.numbers) for chain in chains)


def longest_prefix(chains: Sequence[Chain], prompt: NDArray[np.int64]) -> Chain | None:
    """Return the chain that is the longest prefix of a prompt [prompt], the first of equals; None: no chain is.

    The prompt is hashed once for all chains, not compared with each.
    """
    longest: Chain | None = None
    prefix_hash, num_hashed = blake2b(), 0
    # Sorted by length, so that one running hash passes the end of each chain.
    for chain in sorted(chains, key=lambda chain: chain.num_tokens):
        if chain.num_tokens > len(prompt):
            break
        prefix_hash.update(prompt[num_hashed : chain.num_tokens].tobytes())
        num_hashed = chain.num_tokens
        # Strictly longer, so that the first of equal chains wins (`sorted` is stable).
        is_longer = longest is None or chain.num_tokens > longest.num_tokens
        if is_longer and prefix_hash.digest() == chain.digest:
            longest = chain
    return longest


def _make_segment(calls: Sequence[ModelCall], call_indices: Sequence[int]) -> Segment:
    """Return one training sequence made of the model calls `call_indices`. Each call extends the one before it."""
    last_call = calls[call_indices[-1]]
    # The last call's prompt contains all earlier completions.
    token_ids = last_call.token_ids
    rollout_logprobs = np.zeros(len(token_ids), np.float32)
    weight_versions = np.full(len(token_ids), -1, np.int32)
    turns = np.full(len(token_ids), -1, np.int16)
    retained_sets: list[tuple[int, RetainedSets | None]] = []
    previous_end = 0
    for call_index in call_indices:
        call = calls[call_index]
        start = len(call.prompt_token_ids)
        retained_sets += [(start - previous_end, None), (len(call.completion.token_ids), call.completion.retained_sets)]
        previous_end = start + len(call.completion.token_ids)
        rollout_logprobs[start:previous_end] = call.completion.rollout_logprobs
        weight_versions[start:previous_end] = call.completion.weight_versions
        turns[start:previous_end] = call_index
    # The engine never read the last token, so this token has no experts. Its digest is 0.
    digests = last_call.completion.expert_digests
    return Segment(
        token_ids=token_ids,
        loss_mask=turns >= 0,
        rollout_logprobs=rollout_logprobs,
        weight_versions=weight_versions,
        turns=turns,
        routed_experts=last_call.completion.routed_experts,
        expert_digests=None if digests is None else np.append(digests, np.zeros(1, np.uint32)),
        retained_sets=join_retained(retained_sets),
    )
