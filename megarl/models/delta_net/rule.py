"""The gated delta rule over packed sequences, in chunks (arXiv:2412.06464, section 3.3), and its causal convolution."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megarl.data.token_batch import ranges
from megarl.rounding import divide_up

_CHUNK_TOKENS = 64
"""Chunk length in tokens, as in the paper. Longer chunks need fewer steps, but work grows with the square."""
_NORM_EPSILON = 1e-6
"""Added to the squared norm of queries and keys, as in transformers 5 and FLA."""


class _Chunks(NamedTuple):
    """Chunks of the sequences of a row, sequence by sequence.

    `padded_indices` [tokens]: index of each token in the padded chunks, flattened. `steps`: the chunks of each step
    [sequences], longest sequence first. `output_order` [chunks] sorts the outputs of all steps by chunk.
    """

    num_chunks: int
    size: int
    padded_indices: Tensor
    steps: tuple[Tensor, ...]
    output_order: Tensor


def causal_convolution(x: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """Convolve each channel over the tokens of its own sequence up to the current one, in float32 or wider.

    Shapes: x [tokens, channels], weight [channels, width] with the current token's factor last, positions [tokens] in
    their sequences from 0; returns [tokens, channels].
    """
    wide_x = widen(x)
    factors = widen(weight)
    out = wide_x * factors[:, -1]
    for distance in range(1, min(weight.size(1), len(x))):
        earlier_x = F.pad(wide_x[:-distance], (0, 0, distance, 0))
        is_in_sequence = (positions >= distance).unsqueeze(1)
        out = out + torch.where(is_in_sequence, earlier_x, 0.0) * factors[:, -1 - distance]
    return out.to(x.dtype)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, lengths: Sequence[int]
) -> Tensor:
    """Return the outputs of the gated delta rule, with a state per sequence and head (arXiv:2412.06464, eq. 10).

    state_t = exp(log_decay_t) * state_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T; output_t = state_t q_t. Queries
    and keys are normalised first, and queries divided by sqrt(key_dim). Arithmetic is float32 or wider.

    Shapes: query and key [tokens, heads, key_dim], value [tokens, heads, value_dim], log_decay and beta [tokens,
    heads]; returns [tokens, heads, value_dim]. The tokens are consecutive sequences with these `lengths`.
    """
    # Cut the sequences into chunks: [chunks, heads, tokens of a chunk, channels].
    chunks = _make_chunks(tuple(lengths), value.device)
    q = _split_into_chunks(_normalise(query) * query.size(-1) ** -0.5, chunks)
    k = _split_into_chunks(_normalise(key), chunks)
    v = _split_into_chunks(widen(value), chunks)
    decay = _split_into_chunks(widen(log_decay).unsqueeze(-1), chunks).squeeze(-1).cumsum(-1)
    write_rate = _split_into_chunks(widen(beta).unsqueeze(-1), chunks)

    all_pairs = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=value.device)
    # Mask before the exponential: later tokens would overflow, and their gradient would be NaN.
    decay_between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(all_pairs.triu(1), -torch.inf).exp()
    decay_since_start = decay.exp().unsqueeze(-1)
    # The updates of a chunk's tokens depend on each other: a triangular system. Its diagonal of ones is not stored.
    triangular_system = (write_rate * (k @ k.mT) * decay_between).tril(-1)
    solution = torch.linalg.solve_triangular(
        triangular_system,
        torch.cat([write_rate * v, write_rate * decay_since_start * k], dim=-1),
        upper=False,
        unitriangular=True,
    )
    new_values, read_keys = solution.split([v.size(-1), k.size(-1)], dim=-1)
    scores = (q @ k.mT) * decay_between
    decayed_queries = q * decay_since_start
    last_decay = decay[..., -1:]
    decayed_keys = k * (last_decay - decay).exp().unsqueeze(-1)
    chunk_decay = last_decay.exp().unsqueeze(-1)

    # Only the state goes from chunk to chunk. Each step computes one chunk of every sequence that still has one.
    state = v.new_zeros(len(lengths), v.size(1), k.size(-1), v.size(-1))
    outputs = []
    for step in chunks.steps:
        # Sequences are sorted by length, so the sequences with another chunk come first.
        state = state[: len(step)]
        written_values = new_values[step] - read_keys[step] @ state
        outputs.append(decayed_queries[step] @ state + scores[step] @ written_values)
        state = state * chunk_decay[step] + decayed_keys[step].mT @ written_values
    out = torch.cat(outputs)[chunks.output_order].transpose(1, 2).flatten(0, 1)
    return out[chunks.padded_indices].to(value.dtype)


def widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _normalise(x: Tensor) -> Tensor:
    wide = widen(x)
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _NORM_EPSILON)


def _split_into_chunks(x: Tensor, chunks: _Chunks) -> Tensor:
    """Return [tokens, heads, channels] as [chunks, heads, chunk, channels], padded with zeros.

    Zeros do not change the state of the delta rule.
    """
    padded = x.new_zeros(chunks.num_chunks * chunks.size, *x.shape[1:]).index_copy(0, chunks.padded_indices, x)
    return padded.view(chunks.num_chunks, chunks.size, *x.shape[1:]).transpose(1, 2)


# All layers and both passes of a row share the chunks, so few rows are in use at a time.
@lru_cache(maxsize=16)
def _make_chunks(lengths: tuple[int, ...], device: torch.device) -> _Chunks:
    """Cut sequences of these lengths in tokens into chunks.

    Step i lists the i-th chunk of every sequence that has one.
    """
    sequence_lengths = np.asarray(lengths, dtype=np.int64)
    chunk_tokens = int(min(_CHUNK_TOKENS, sequence_lengths.max()))
    num_chunks = divide_up(sequence_lengths, by=chunk_tokens)
    first_chunks = num_chunks.cumsum() - num_chunks
    padded_indices = ranges(first_chunks * chunk_tokens, sequence_lengths)
    longest_first = np.argsort(-num_chunks, kind="stable")
    steps = [
        first_chunks[longest_first[: int((num_chunks > step).sum())]] + step for step in range(int(num_chunks.max()))
    ]
    return _Chunks(
        int(num_chunks.sum()),
        chunk_tokens,
        torch.tensor(padded_indices, device=device),
        tuple(torch.tensor(step, device=device) for step in steps),
        torch.tensor(np.argsort(np.concatenate(steps)), device=device),
    )
