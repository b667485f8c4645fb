"""Length penalty of completions."""

from __future__ import annotations

from torch import Tensor


def soft_overlong(lengths: Tensor, *, longest: int, buffer: int) -> Tensor:
    """Return 0 up to `longest` - `buffer` tokens, then a linear decrease to -1 at `longest`: float [samples].

    `lengths` int [samples] counts completion tokens. Source: DAPO (arXiv 2503.14476, eq. 13).
    """
    return ((longest - buffer - lengths) / buffer).clamp(-1.0, 0.0)
