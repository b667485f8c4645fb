"""Gated delta-nets of vLLM 0.30 on a machine without CUDA, computed by torch from the layer's own parameters.

vLLM's CPU kernels need bfloat16, head sizes of 64 or 128, and a repacked convolution weight. On CPUs with AVX-512 BF16
they return wrong numbers for a plain weight, without an error. This module computes in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

_NORM_EPSILON = 1e-6
"""Added to the squared norm of queries and keys, as in vLLM's kernels."""


class _Batch(NamedTuple):
    """Sequences of one engine step: the places of their tokens, and of their states in the layer's cache.

    A slot is a row of the cache with the state of one sequence. `slots` [sequences] hold the states before the step.
    `lengths` [sequences] counts new tokens. `places` [tokens] indexes the tokens in [sequences, longest], flattened.
    `has_state` [sequences]: the state contains earlier tokens of the sequence.

    A step that verifies drafted tokens starts from the state after the last accepted token. It stores the state after
    each of its tokens, because the next step may start from any of them. Three fields are set only in such steps.
    `inputs` [sequences] are the slots of the convolution's inputs. `skipped` [sequences] is the number of inputs before
    those of the last accepted token. `token_slots` [sequences, longest] are the slots of the states after each token.
    """

    slots: Tensor
    lengths: Tensor
    longest: int
    places: Tensor
    has_state: Tensor
    inputs: Tensor
    skipped: Tensor
    token_slots: Tensor | None = None

    def pad(self, x: Tensor) -> Tensor:
        """Return [tokens, ...] as float32 [sequences, longest, ...], padded with zeros."""
        block = torch.zeros(len(self.lengths) * self.longest, *x.shape[1:]).index_copy(0, self.places, x.float())
        return block.unflatten(0, (-1, self.longest))

    def states(self, cached: Tensor) -> Tensor:
        """Return the sequences' states [sequences, ...] in float32, zero for new sequences."""
        cached = cached.float()
        # A slot still holds the state of an earlier sequence. It may be NaN, so replace it; do not multiply by 0.
        return torch.where(self.has_state.view(-1, *[1] * (cached.dim() - 1)), cached, 0.0)

    def tokens(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)[self.places]


def attend(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: Any) -> None:
    """Write a delta-net's outputs into `core_attn_out` [tokens, heads, value_dim], and its states into its cache.

    Replaces `cpu_gdn_attention_core`. Shapes: mixed_qkv [tokens, channels of queries, keys and values], a and b
    [tokens, heads].
    """
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import _resolve_layer_name

    name = _resolve_layer_name(layer_name)
    context: Any = get_forward_context()
    # vLLM's profiling runs pass no metadata.
    if context.attn_metadata is None:
        return
    layer, metadata = context.no_compile_layers[name], context.attn_metadata[name]
    for index, batch in _make_batches(metadata):
        convolved = _convolve(layer, mixed_qkv[index], batch)
        core_attn_out[index] = _apply_delta_rule(layer, convolved, a[index], b[index], batch).to(core_attn_out.dtype)


def _make_batches(metadata: Any) -> Iterator[tuple[Tensor, _Batch]]:
    """Yield (token indices, batch) for the step's plain sequences, then for its sequences with drafted tokens."""
    all_tokens = torch.arange(metadata.num_actual_tokens)
    if metadata.spec_sequence_masks is None:
        if len(all_tokens):
            yield all_tokens, _make_plain_batch(metadata)
        return
    has_plain_sequences = metadata.num_decodes + metadata.num_prefills > 0
    if has_plain_sequences:
        yield metadata.non_spec_token_indx.long(), _make_plain_batch(metadata)
    # Without plain sequences, all tokens are those of drafted sequences.
    drafted_tokens = metadata.spec_token_indx.long() if has_plain_sequences else all_tokens
    yield drafted_tokens, _make_drafted_batch(metadata)


def _make_plain_batch(metadata: Any) -> _Batch:
    """Return the batch of a step without drafts, from vLLM's attention metadata."""
    count = metadata.num_decodes + metadata.num_prefills
    lengths, longest, places = _find_lengths(metadata.non_spec_query_start_loc, count)
    # A decoding sequence always has a state.
    has_state = torch.ones(count, dtype=torch.bool)
    if metadata.num_prefills:
        has_state[metadata.num_decodes :] = metadata.has_initial_state[metadata.num_decodes : count]
    slots = metadata.non_spec_state_indices_tensor[:count].long()
    return _Batch(slots, lengths, longest, places, has_state, slots, torch.zeros_like(slots))


def _make_drafted_batch(metadata: Any) -> _Batch:
    """Return the batch of a step that verifies drafts.

    Each sequence has one slot per draft. It continues from the slot of its last accepted draft.
    """
    count = metadata.num_spec_decodes
    lengths, longest, places = _find_lengths(metadata.spec_query_start_loc, count)
    token_slots = metadata.spec_state_indices_tensor[:count].long()
    skipped = metadata.num_accepted_tokens[:count].long() - 1
    slots = token_slots.gather(1, skipped[:, None])[:, 0]
    has_state = torch.ones(count, dtype=torch.bool)
    return _Batch(slots, lengths, longest, places, has_state, token_slots[:, 0], skipped, token_slots[:, :longest])


def _find_lengths(starts: Tensor, count: int) -> tuple[Tensor, int, Tensor]:
    """Return a batch's `lengths`, `longest` and `places` from the first token of each sequence [sequences + 1]."""
    lengths = starts[: count + 1].diff().long()
    longest = int(lengths.max())
    is_token = torch.arange(longest) < lengths.unsqueeze(1)
    return lengths, longest, is_token.flatten().nonzero().squeeze(1)


def _convolve(layer: Any, x: Tensor, batch: _Batch) -> Tensor:
    """Return the inputs `x` [tokens, channels] after convolution and activation, as float32.

    Each sequence's last inputs are stored in the layer's cache, where its next tokens find them. If the engine drafts,
    the cache has further rows for the drafted tokens.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    cache = layer.kv_cache[0]
    if is_conv_state_dim_first():
        cache = cache.transpose(-1, -2)
    weight = layer.conv1d.weight.flatten(1).float()
    kernel_width = weight.size(1)

    def take_rows(source: Tensor, first: Tensor, count: int) -> Tensor:
        """Return `count` rows of each sequence, from `first` [sequences] on: [sequences, count, channels]."""
        row_indices = (first.unsqueeze(1) + torch.arange(count)).unsqueeze(-1).expand(-1, -1, source.size(-1))
        return source.gather(1, row_indices)

    inputs_before = batch.states(take_rows(cache[batch.inputs], batch.skipped, kernel_width - 1))
    all_inputs = torch.cat([inputs_before, batch.pad(x)], dim=1)
    convolved = sum(
        (all_inputs[:, tap : tap + batch.longest] * weight[:, tap] for tap in range(kernel_width)),
        start=torch.zeros(()),
    )
    # Store the inputs before the next token. With drafts, store them for each token that may come next.
    last_inputs = (
        take_rows(all_inputs, batch.lengths, kernel_width - 1) if batch.token_slots is None else all_inputs[:, 1:]
    )
    cache[batch.inputs, : last_inputs.size(1)] = last_inputs.to(cache.dtype)
    return F.silu(batch.tokens(convolved))


def _apply_delta_rule(layer: Any, convolved: Tensor, a: Tensor, b: Tensor, batch: _Batch) -> Tensor:
    """Return the outputs of the gated delta rule, float32 [tokens, heads, value_dim]; update the states in the cache.

    Shapes: convolved [tokens, channels], a and b [tokens, heads].
    """
    num_value_heads, num_key_heads = layer.num_v_heads // layer.tp_size, layer.num_k_heads // layer.tp_size
    channel_counts = [
        num_key_heads * layer.head_k_dim,
        num_key_heads * layer.head_k_dim,
        num_value_heads * layer.head_v_dim,
    ]
    q, k, v = convolved.split(channel_counts, dim=-1)
    q, k = (
        _normalize(x.unflatten(-1, (num_key_heads, -1))).repeat_interleave(num_value_heads // num_key_heads, dim=1)
        for x in (q, k)
    )
    decay = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias.float())
    queries, all_keys, values = (
        batch.pad(q * layer.head_k_dim**-0.5),
        batch.pad(k),
        batch.pad(v.unflatten(-1, (num_value_heads, -1))),
    )
    # Padding follows a sequence's tokens. With log-decay 0 and rate 0 it leaves the state unchanged.
    decays, rates = batch.pad(decay).exp()[..., None, None], batch.pad(b.float().sigmoid()).unsqueeze(-1)
    cache = layer.kv_cache[1]
    state = batch.states(cache[batch.slots])
    outputs = []
    for position in range(batch.longest):
        state = state * decays[:, position]
        key = all_keys[:, position].unsqueeze(-1)
        # The delta rule: move the value that the state stores for this key towards the token's value.
        value_change = values[:, position] - (state @ key).squeeze(-1)
        state = state + (rates[:, position] * value_change).unsqueeze(-1) * key.mT
        outputs.append((state @ queries[:, position].unsqueeze(-1)).squeeze(-1))
        if batch.token_slots is not None:
            has_token = position < batch.lengths
            cache[batch.token_slots[has_token, position]] = state[has_token].to(cache.dtype)
    if batch.token_slots is None:
        cache[batch.slots] = state.to(cache.dtype)
    return batch.tokens(torch.stack(outputs, dim=1))


def _normalize(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPSILON)
