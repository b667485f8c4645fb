"""Predicted bytes of an update's passes through a trained EAGLE-3 drafter (`models.drafts.drafter`)."""

from __future__ import annotations

from megarl.families.eagle3 import DrafterShape
from megarl.planner.memory.activations import PassSettings

_FLOAT32 = 4
_CHUNK_QUERIES = 128  # As in `models.drafts.drafter`, which imports torch.
_SCORE_COPIES = 3
"""Arrays as large as a chunk's scores: the scores, their softmax and its gradient."""


def drafter_bytes(shape: DrafterShape, settings: PassSettings, *, num_steps: int, ranks_per_row: int) -> int:
    """Return the peak bytes that drafting one row takes during an update, on top of the policy's bytes.

    `ranks_per_row` ranks share the row's positions. Each rank has the hidden states of the whole row.
    """
    hidden, size = shape.hidden_size, settings.itemsize
    query_channels, key_channels = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    # Three states, the policy's last state, embedding, projection and the layer's inputs. Two norms also save float32.
    bytes_per_token = (3 + 1 + 1 + 1 + 2) * hidden * size + 2 * hidden * _FLOAT32 + 2 * key_channels * size
    # Per step: the layer's inputs and four hidden states; four states in float32 for the norms; queries, keys,
    # values and attention's output; four activations of the feed-forward layer.
    layer_bytes_per_token = (
        (2 + 4) * hidden * size
        + 4 * hidden * _FLOAT32
        + (2 * query_channels + 2 * key_channels + 4 * shape.intermediate_size) * size
    )
    score_bytes = _SCORE_COPIES * _CHUNK_QUERIES * settings.longest * shape.num_heads * _FLOAT32
    head_bytes = shape.vocab_size * hidden * size
    return (
        settings.row_tokens * (bytes_per_token + num_steps * layer_bytes_per_token // ranks_per_row)
        + score_bytes
        + head_bytes
    )
