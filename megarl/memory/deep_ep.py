"""DeepEP's buffers on a rank (`trainer.moe_dispatcher: flex`), as Megatron-Core has them made. Integers only.

Read in DeepEP 1.2.1 (csrc/config.hpp, deep_ep/buffer.py) and Megatron-Core 0.16.1 (transformer/moe/fused_a2a.py): one
buffer for all layers, as large as DeepEP's configuration for so many ranks asks for, in dispatch or in combine. Between
nodes it lies in NVSHMEM's heap, which is inferred: it grows by the granules that DeepEP sets, and by DeepEP's own note
NVSHMEM needs 256 MiB of it. Not counted: NVSHMEM's queues, and what the kernels take, which is part of CUDA's context.
"""

from __future__ import annotations

NODE_RANKS = 8
"""Ranks that DeepEP takes for those of a node: more are of several nodes, and a multiple of it."""
NUM_SMS = 20
"""Multiprocessors that its kernels take: Megatron-Core's `moe_deepep_num_sms`."""

RECEIVED_TOKENS = {
    2: (256, 0), 4: (256, 0), 8: (256, 0), 16: (288, 140), 24: (288, 128), 32: (288, 128), 48: (288, 128),
    64: (288, 140), 96: (480, 132), 128: (560, 132), 144: (720, 132), 160: (720, 132),
}  # fmt: skip
"""Tokens that a channel has room for from a rank of its node and from another node, by the number of ranks.

DeepEP knows no other numbers of ranks; 48 and 96 came after 1.2.1. The second is the larger of dispatch and combine.
"""

_META_BYTES = 8
"""Where a token came from: two int32."""
_MOST_EXPERTS, _MOST_SCALES = 128, 128
"""Of a token: experts (an int64 and a float32 each) and float32 scales that there is room for."""
_ALIGNMENT = 128
_WORKSPACE_BYTES = 32 << 20
_HEAP_BYTES = 256 << 20
_HEAP_GRANULE = 512 << 20


def deep_ep_bytes(hidden_size: int, itemsize: int, num_ranks: int, num_sms: int = NUM_SMS) -> int:
    """Bytes of DeepEP's buffers for tokens of so many channels that `num_ranks` (etp * ep) ranks exchange.

    `itemsize` is that of a channel in bytes. A number of ranks that DeepEP does not know takes nothing: it is refused.
    """
    if num_ranks not in RECEIVED_TOKENS:
        return 0
    of_peer, of_node = RECEIVED_TOKENS[num_ranks]
    channels, nodes, peers = num_sms // 2, max(num_ranks // NODE_RANKS, 1), min(num_ranks, NODE_RANKS)
    token = hidden_size * max(itemsize, 2) + _META_BYTES + _MOST_EXPERTS * (8 + 4) + _MOST_SCALES * 4
    within = channels * peers * ((2 * nodes + 3) * 4 + of_peer * token)
    if num_ranks <= NODE_RANKS:
        return _aligned(within, _ALIGNMENT) + _WORKSPACE_BYTES
    # Both ways; each token with 16 bytes that align it.
    heads = (2 * NODE_RANKS + 2) * 4
    between = _aligned(2 * channels * nodes * (heads + of_node * (token + 16)), _ALIGNMENT)
    return _aligned(within, _ALIGNMENT) + _WORKSPACE_BYTES + _aligned(between + _HEAP_BYTES, _HEAP_GRANULE)


def _aligned(size: int, unit: int) -> int:
    return -(-size // unit) * unit
