"""Predicted bytes of an update's passes through a trained EAGLE-3 drafter (`models.drafter`)."""

from __future__ import annotations

from megarl.families.eagle3 import DrafterShape
from megarl.planner.memory.activations import PassSettings

_FLOAT32 = 4
_CHUNK_QUERIES = 128  # As in `models.drafter`, which imports torch.
_SCORE_COPIES = 3
"""Arrays as large as a chunk's scores: the scores, their softmax and its gradient."""


def drafter_bytes(shape: DrafterShape, settings: PassSettings, *, num_steps: int, num_parts: int) -> int:
    """Return the peak bytes that drafting one row takes during an update, on top of the policy's bytes.

    `num_parts` ranks share the row's positions. Each rank has the hidden states of the whole row.
    """
    hidden, size = shape.hidden_size, settings.itemsize
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    # Three states, the policy's last state, embedding, projection and the layer's inputs. Two norms also save float32.
    row = (3 + 1 + 1 + 1 + 2) * hidden * size + 2 * hidden * _FLOAT32 + 2 * keys * size
    layer = (
        (2 + 4) * hidden * size + 4 * hidden * _FLOAT32 + (2 * queries + 2 * keys + 4 * shape.intermediate_size) * size
    )
    scores = _SCORE_COPIES * _CHUNK_QUERIES * settings.longest * shape.num_heads * _FLOAT32
    rows_of_head = shape.vocab_size * hidden * size
    return settings.row_tokens * (row + num_steps * layer // num_parts) + scores + rows_of_head
