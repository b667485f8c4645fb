"""Copies of weights cached by layers between passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn


def drop_weight_copies(chunks: Sequence[nn.Module]) -> None:
    """Free the FP8 copies of weights in Transformer Engine's layers. The next pass makes new ones."""
    for chunk in chunks:
        for module in chunk.modules():
            # Transformer Engine 2.11 to 2.20 offers no public way to drop these caches.
            copies: Any = getattr(module, "_fp8_workspaces", None)
            if copies is not None:
                copies.clear()
