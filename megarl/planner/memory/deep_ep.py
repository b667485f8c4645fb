"""Bytes of DeepEP's buffers on a rank (`trainer.moe_dispatcher: flex`), as created by Megatron-Core.

All layers share one buffer. Its size follows DeepEP's configuration for the number of ranks, of dispatch or combine,
whichever is larger. Source: DeepEP 1.2.1 (csrc/config.hpp, deep_ep/buffer.py) and Megatron-Core 0.16.1
(transformer/moe/fused_a2a.py).

With several nodes, the buffer is in NVSHMEM's heap. The heap's size is inferred: it grows by DeepEP's granules, and
NVSHMEM needs 256 MiB of it (DeepEP's documentation). Not counted: NVSHMEM's queues, and the kernels' memory, a part of
CUDA's context.
"""

from __future__ import annotations

from megarl.rounding import round_up

NODE_RANKS = 8
"""Ranks that DeepEP expects on a node. A larger number of ranks must be a multiple of it."""
NUM_SMS = 20
"""Multiprocessors used by DeepEP's kernels: Megatron-Core's `moe_deepep_num_sms`."""

RECEIVED_TOKENS = {
    2: (256, 0), 4: (256, 0), 8: (256, 0), 16: (288, 140), 24: (288, 128), 32: (288, 128), 48: (288, 128),
    64: (288, 140), 96: (480, 132), 128: (560, 132), 144: (720, 132), 160: (720, 132),
}  # fmt: skip
"""Tokens in one channel of the buffer, by number of ranks: from a rank of the same node, and from another node.

DeepEP supports no other numbers of ranks; 48 and 96 were added after 1.2.1. The second value is the larger one of
dispatch and combine.
"""

_INT32_BYTES = 4
_META_BYTES = 8
"""Bytes for a token's origin: two int32."""
_MOST_EXPERTS, _MOST_SCALES = 128, 128
"""Maximum per token of experts (an int64 and a float32 each) and of float32 scales: space is reserved for them."""
# Constants of DeepEP 1.2.1: alignment and workspace of a buffer, then NVSHMEM's heap and its granules.
_ALIGNMENT = 128
_WORKSPACE_BYTES = 32 << 20
_HEAP_BYTES = 256 << 20
_HEAP_GRANULE = 512 << 20


def deep_ep_bytes(*, hidden_size: int, itemsize: int, num_ranks: int, num_sms: int = NUM_SMS) -> int:
    """Return the bytes of DeepEP's buffers if `num_ranks` (etp * ep) ranks exchange tokens.

    `itemsize`: bytes per number of a token. An unsupported number of ranks gives 0; a check rejects it.
    """
    if num_ranks not in RECEIVED_TOKENS:
        return 0
    tokens_from_rank, tokens_from_node = RECEIVED_TOKENS[num_ranks]
    # A channel occupies two multiprocessors: one sends, one receives.
    num_channels = num_sms // 2
    num_nodes, ranks_on_node = max(num_ranks // NODE_RANKS, 1), min(num_ranks, NODE_RANKS)
    # An expert of a token has an index (8 bytes) and a weight (4 bytes).
    token_bytes = hidden_size * max(itemsize, 2) + _META_BYTES + _MOST_EXPERTS * (8 + 4) + _MOST_SCALES * 4

    # Buffer for ranks of the same node: in each channel, 2 * nodes + 3 int32 of bookkeeping and the tokens per rank.
    head_bytes = (2 * num_nodes + 3) * _INT32_BYTES
    node_bytes = num_channels * ranks_on_node * (head_bytes + tokens_from_rank * token_bytes)
    node_bytes = round_up(node_bytes, multiple=_ALIGNMENT) + _WORKSPACE_BYTES
    if num_ranks <= NODE_RANKS:
        return node_bytes

    # Buffers between nodes, one for sending and one for receiving. Each token is aligned to 16 bytes.
    head_bytes = (2 * NODE_RANKS + 2) * _INT32_BYTES
    network_bytes = 2 * num_channels * num_nodes * (head_bytes + tokens_from_node * (token_bytes + 16))
    network_bytes = round_up(network_bytes, multiple=_ALIGNMENT)
    return node_bytes + round_up(network_bytes + _HEAP_BYTES, multiple=_HEAP_GRANULE)
