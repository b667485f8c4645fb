"""Rotary position embeddings in the engine's arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.platform.exact import rotary


class RotaryTable:
    """Cosines and sines of all positions, rounded to the model's dtype like vLLM's table.

    `frequencies` is float32 [rotary_channels / 2], in radians per position.
    """

    def __init__(self, frequencies: Tensor, num_positions: int, dtype: torch.dtype) -> None:
        positions = torch.arange(num_positions, dtype=torch.float32, device=frequencies.device)
        angles = torch.outer(positions, frequencies)
        self._cosines, self._sines = angles.cos().to(dtype), angles.sin().to(dtype)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate queries or keys [tokens, heads, head_dim] by their positions [tokens].

        Only the first channels rotate. Products and sums are float32. Results are rounded once, or truncated where
        vLLM's kernel truncates.
        """
        # Padding after a sequence of full length has positions beyond the table. Its angle does not matter.
        positions = positions.clamp(max=len(self._cosines) - 1)
        cosines, sines = (table[positions].float()[:, None] for table in (self._cosines, self._sines))
        half_width = cosines.size(-1)
        first_half, second_half, unrotated = x.split([half_width, half_width, x.size(-1) - 2 * half_width], dim=-1)
        first_half, second_half = first_half.float(), second_half.float()
        rotated = torch.cat(
            [first_half * cosines - second_half * sines, second_half * cosines + first_half * sines], dim=-1
        )
        if x.dtype == torch.bfloat16 and rotary.truncates():
            rotated = _truncate(rotated)
        return torch.cat([rotated.to(x.dtype), unrotated], dim=-1)


def _truncate(values: Tensor) -> Tensor:
    """Cut float32 values [*shape] to the bits of bfloat16. The gradient passes unchanged."""
    truncated = (values.detach().view(torch.int32) & -(1 << 16)).view(torch.float32)
    # Subtraction and addition are exact, because the two values are very close. So the result has the bits of
    # `truncated`.
    return values + (truncated - values.detach())
