"""Rounding of vLLM's rotary embedding on this processor."""

from __future__ import annotations

from functools import cache

import torch

from megarl.platform import libraries


@cache
def truncates() -> bool:
    """Return whether vLLM's rotary embedding truncates float32 to bfloat16 on this CPU, instead of rounding. vLLM 0.30
    rounds only on processors with AVX-512 BF16. This function calls the kernel once to find out.
    """
    libraries.prepare_vllm()
    from vllm import _custom_ops

    head_size = 32
    # 1.5 * 1.0078125 = 1.51171875 lies midway between the bfloat16 numbers 1.5078125 and 1.515625. Rounding gives the
    # even one, 1.515625.
    query = torch.full((1, head_size), 1.5, dtype=torch.bfloat16)
    cosines, sines = torch.full((head_size // 2,), 1.0078125), torch.zeros(head_size // 2)
    table = torch.cat([cosines, sines]).to(torch.bfloat16)[None]
    _custom_ops.rotary_embedding(torch.zeros(1, dtype=torch.int64), query, None, head_size, table, True)
    return float(query[0, 0]) < 1.51
