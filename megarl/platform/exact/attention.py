"""vLLM's attention kernel for CPUs, called on sequences without a KV cache (`trainer.exact`)."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megarl.platform import libraries
from megarl.rounding import divide_up


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    num_queries: NDArray[np.int64],
    num_keys: NDArray[np.int64],
    *,
    scale: float,
    window: int,
) -> Tensor:
    """Return causal attention within packed sequences, bit-equal to an engine's with the same keys in its cache.

    Shapes: q [queries, heads, head_dim], k and v [keys, key-value heads, head_dim]. Sequences lie end to end in the
    first dimension. `num_queries` and `num_keys` [sequences] are their lengths. A sequence's last query and last key
    have the same position. A query attends to the last `window` keys up to its position, or to all if `window` is 0.
    Returns [queries, heads, head_dim].
    """
    libraries.prepare_vllm()
    from vllm import _custom_ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    from megarl.platform.cpu.vllm_patches import BLOCK_TOKENS

    block_tokens, (_, num_kv_heads, head_dim) = BLOCK_TOKENS, k.shape
    num_blocks = divide_up(num_keys, by=block_tokens)
    first_blocks = num_blocks.cumsum() - num_blocks
    # As in the engine's cache, each sequence starts a new block. Unused entries of the table are never read.
    block_table = torch.from_numpy(first_blocks[:, None] + np.arange(num_blocks.max())).to(torch.int32)
    key_starts = num_keys.cumsum() - num_keys
    cache_slots = torch.from_numpy(np.arange(len(k)) + np.repeat(first_blocks * block_tokens - key_starts, num_keys))
    instruction_set = _get_attn_isa(q.dtype, block_tokens, head_dim)
    cache = q.new_zeros(int(num_blocks.sum()), num_kv_heads, 2 * block_tokens, head_dim)
    key_cache, value_cache = cache.chunk(2, dim=2)
    _custom_ops.cpu_attn_reshape_and_cache(
        k.contiguous(), v.contiguous(), key_cache, value_cache, cache_slots, instruction_set, 1.0, 1.0, "auto"
    )
    query_starts = torch.from_numpy(np.concatenate([[0], num_queries.cumsum()])).to(torch.int32)
    key_lengths = torch.from_numpy(num_keys).to(torch.int32)
    window_limit = window or -1
    schedule = _custom_ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(num_queries),
        num_heads=q.size(1),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        seq_lens=key_lengths,
        dtype=q.dtype,
        query_start_loc=query_starts,
        causal=True,
        sliding_window_size=window_limit,
        isa=instruction_set,
        # The sum over split keys would depend on the numbers of threads and requests.
        enable_kv_split=False,
    )
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _custom_ops.cpu_attention_with_kv_cache(
        query=q.contiguous(),
        key_cache=key_cache,
        value_cache=value_cache,
        output=out,
        query_start_loc=query_starts,
        seq_lens=key_lengths,
        scale=scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=window_limit,
        block_table=block_table,
        softcap=0.0,
        scheduler_metadata=schedule,
        s_aux=None,
    )
    return out
