"""Verification of drafted tokens (speculative decoding) by vLLM 0.30 on a machine without Triton.

vLLM 0.30 calls its rejection sampler through dispatchers of Triton kernels. Nothing calls its C++ kernels for CPUs, and
one would round temperatures to integers. The functions here take the inputs of the Triton kernels, and compute the same
in torch. `_advance_positions` replaces the kernel between two tokens drafted by a model.

The algorithm is speculative sampling (Leviathan et al., arXiv 2211.17192): the tokens have the policy's distribution,
whatever was drafted. A request's drafts are `draft_token_ids[start:end]`: `end` is the request's entry of
`cu_num_draft_tokens`, `start` the entry before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def install() -> None:
    """Replace vLLM's Triton kernels for speculative decoding by functions for CPUs."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.spec_decode import utils

    # For drafting, vLLM has C++ kernels for all dispatchers except this one. It is called from the second draft on.
    utils._eagle_step_slot_mapping_metadata.kernel = _Kernel(_advance_positions)  # pyright: ignore[reportAttributeAccessIssue]
    for dispatcher, function in {
        "_rejection_greedy_sample": _accept_greedy,
        "_rejection_random_sample": _accept_random,
        "_expand": _repeat_for_drafts,
        "_sample_recovered_tokens": _draw_replacements,
    }.items():
        getattr(rejection_sampler, dispatcher).kernel = _Kernel(function)


class _Kernel:
    """Wraps a function to be called like a Triton kernel: `kernel[grid](**arguments)`.

    vLLM reads the parameters of `func`, and passes inputs of these names.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.func = function

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.func


def _advance_positions(
    positions: Tensor,
    block_table: Tensor,
    block_table_stride: int,
    seq_lens: Tensor,
    out_clamped_positions: Tensor,
    out_slot_mapping: Tensor,
    *,
    block_size: int,
    max_model_len: int,
    n_blocks_per_req: int,
    PAD_ID: int,  # noqa: N803
    batch_size: int,
    **_: Any,
) -> None:
    """Advance each request by one position: write position, place in the KV cache and length.

    A request beyond `max_model_len` tokens gets position 0, place `PAD_ID` and length 1, so it writes nowhere. Shapes:
    positions, seq_lens and out_clamped_positions [requests], block_table [requests, blocks], out_slot_mapping [requests
    or more].
    """
    new_positions = positions[:batch_size] + 1
    is_beyond = new_positions >= max_model_len
    new_positions = new_positions.masked_fill(is_beyond, 0)
    block_indices = (new_positions // block_size).clamp(max=n_blocks_per_req - 1)
    slots = block_table[:batch_size].gather(1, block_indices[:, None])[:, 0] * block_size + new_positions % block_size
    out_slot_mapping[:batch_size] = slots.masked_fill(is_beyond, PAD_ID)
    out_slot_mapping[batch_size:] = PAD_ID
    new_lengths = (seq_lens[:batch_size] + 1).masked_fill(is_beyond, 1).clamp(max=max_model_len)
    seq_lens[:batch_size] = new_lengths
    # Write this last: it may be the same memory as `positions`.
    out_clamped_positions[:batch_size] = new_positions


def _accept_greedy(
    output_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    draft_token_ids: Tensor,
    target_argmax: Tensor,
    bonus_token_ids: Tensor,
    is_greedy: Tensor | None,
    **_: Any,
) -> None:
    """Write the tokens of greedy requests: accepted drafts, then the policy's most probable token.

    Shapes: output_token_ids int32 [requests, most drafts + 1], cu_num_draft_tokens [requests], draft_token_ids and
    target_argmax [drafts], bonus_token_ids [requests, 1], is_greedy bool [requests] or None for all.
    """
    is_accepted = draft_token_ids == target_argmax
    for request, start, end in _list_draft_ranges(cu_num_draft_tokens):
        if is_greedy is None or is_greedy[request]:
            replacements = torch.cat((target_argmax[start:end], bonus_token_ids[request].view(1)))
            _write_tokens(output_token_ids[request], draft_token_ids[start:end], replacements, is_accepted[start:end])


def _accept_random(
    output_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    draft_token_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    bonus_token_ids: Tensor,
    recovered_token_ids: Tensor,
    uniform_probs: Tensor,
    is_greedy: Tensor,
    **_: Any,
) -> None:
    """Write the tokens of requests with a temperature: accepted drafts, then a recovered or a further token.

    A draft is accepted with probability min(1, target / draft). Shapes as in `_accept_greedy`; draft_probs (None: one)
    and target_probs [drafts, vocabulary], recovered_token_ids and uniform_probs [drafts].
    """
    # A padded draft is -1. It has probability 0, so it is never accepted.
    draft_columns = draft_token_ids.long().clamp(min=0)[:, None]
    target_probability = target_probs.gather(1, draft_columns)[:, 0]
    draft_probability = (
        torch.ones_like(target_probability) if draft_probs is None else draft_probs.gather(1, draft_columns)[:, 0]
    )
    is_likely = (draft_probability > 0) & (target_probability.double() >= uniform_probs * draft_probability.double())
    is_accepted = is_likely & (draft_token_ids >= 0)
    for request, start, end in _list_draft_ranges(cu_num_draft_tokens):
        if not is_greedy[request]:
            replacements = torch.cat((recovered_token_ids[start:end], bonus_token_ids[request].view(1)))
            _write_tokens(output_token_ids[request], draft_token_ids[start:end], replacements, is_accepted[start:end])


def _repeat_for_drafts(
    output: Tensor,
    input: Tensor,
    cu_num_tokens: Tensor,
    replace_from: int,
    replace_to: int,
    **_: Any,
) -> None:
    """Repeat each request's value for its drafts, and write `replace_to` where it is `replace_from`.

    Shapes: input and cu_num_tokens [requests], output [drafts].
    """
    values = input.masked_fill(input == replace_from, replace_to)
    output.copy_(values.repeat_interleave(_counts(cu_num_tokens)))


def _draw_replacements(
    output_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    draft_token_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    inv_q: Tensor,
    **_: Any,
) -> None:
    """Draw a replacement for each draft, from the positive part of target - draft.

    Takes the token with the largest probability divided by exponential noise. Shapes: output_token_ids and
    draft_token_ids [drafts], draft_probs (None: the draft has probability one) and target_probs [drafts, vocabulary],
    inv_q [requests, vocabulary], the inverse of the noise.
    """
    if draft_probs is None:
        residual = target_probs.scatter(1, draft_token_ids.long().clamp(min=0)[:, None], 0.0)
    else:
        residual = (target_probs - draft_probs).clamp(min=0.0)
    noise = inv_q.repeat_interleave(_counts(cu_num_draft_tokens), dim=0)
    output_token_ids.copy_((residual * noise).argmax(dim=-1))


def _write_tokens(output: Tensor, drafts: Tensor, replacements: Tensor, is_accepted: Tensor) -> None:
    """Write the accepted first drafts of a request and one replacement after them into `output` [most drafts + 1].

    Shapes: drafts and is_accepted [drafts], replacements [drafts + 1]. The other entries of `output` stay.
    """
    num_accepted = int(is_accepted.long().cumprod(0).sum())
    output[:num_accepted] = drafts[:num_accepted]
    output[num_accepted] = replacements[num_accepted]


def _list_draft_ranges(cu_num_draft_tokens: Tensor) -> Iterator[tuple[int, int, int]]:
    start = 0
    for request, end in enumerate(cu_num_draft_tokens.tolist()):
        yield request, start, end
        start = end


def _counts(cumulated: Tensor) -> Tensor:
    return torch.diff(cumulated, prepend=cumulated.new_zeros(1))
