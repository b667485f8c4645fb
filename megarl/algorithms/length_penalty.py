"""Length penalty of completions."""

from __future__ import annotations

from torch import Tensor


def soft_overlong(lengths: Tensor, *, longest: int, buffer: int) -> Tensor:
    """Zero up to `longest` - `buffer` tokens, then a straight fall to -1 at `longest`: float [samples].

    `lengths` int [samples], completion tokens. Source: DAPO (arXiv 2503.14476, eq. 13).
    """
    return ((longest - buffer - lengths) / buffer).clamp(-1.0, 0.0)
