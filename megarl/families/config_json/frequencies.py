"""Formulas of scaled rotary frequencies, for arrays of torch and of numpy. Neither is imported.

transformers 5 and vLLM 0.30 have the same formulas, in the same order of operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from megarl.families.config_json.rotary import Rotary

Array = Any
"""A one-dimensional float32 array of numpy, or a tensor of torch."""
Where = Callable[[Array, Array, Array], Array]
"""Function `where` of torch or numpy: where(condition, if true, if false), element by element."""


def scaled_frequencies(rotary: Rotary, num_channels: int, exponents: Array, pairs: Array, where: Where) -> Array:
    """Return the angle per position of each pair of channels, [num_channels / 2], in radians.

    `exponents` are the even numbers below num_channels, divided by num_channels. `pairs` numbers the pairs from 0.
    """
    plain = 1.0 / rotary.theta**exponents
    if rotary.scaling == "linear":
        return plain / rotary.factor
    if rotary.scaling == "llama3":
        return _llama3_frequencies(plain, rotary, where)
    if rotary.scaling == "yarn":
        divided = 1.0 / (rotary.factor * rotary.theta**exponents)
        return _yarn_frequencies(plain, divided, pairs, rotary, num_channels)
    return plain


def _llama3_frequencies(plain: Array, rotary: Rotary, where: Where) -> Array:
    """Return Llama 3.1's frequencies [pairs]: long wavelengths are divided by the factor, medium ones interpolated."""
    wavelengths = 2 * math.pi / plain
    longest = rotary.original_positions / rotary.low_factor
    shortest = rotary.original_positions / rotary.high_factor
    smooth = (rotary.original_positions / wavelengths - rotary.low_factor) / (rotary.high_factor - rotary.low_factor)
    medium = (1 - smooth) * plain / rotary.factor + smooth * plain
    scaled = where(wavelengths > longest, plain / rotary.factor, medium)
    return where(wavelengths < shortest, plain, scaled)


def _yarn_frequencies(plain: Array, divided: Array, pairs: Array, rotary: Rotary, num_channels: int) -> Array:
    """Return YaRN's frequencies [pairs] (arXiv:2309.00071, section 3.2).

    Fast pairs have their `plain` frequency, slow pairs the `divided` one, and pairs between them a linear mixture.
    """

    def find_pair(rotations: float) -> float:
        """Return the pair, a real number, with this number of rotations over the original context."""
        positions_per_radian = rotary.original_positions / (rotations * 2 * math.pi)
        return num_channels * math.log(positions_per_radian) / (2 * math.log(rotary.theta))

    start, end = find_pair(rotary.beta_fast), find_pair(rotary.beta_slow)
    if rotary.truncate:
        start, end = math.floor(start), math.ceil(end)
    # The bound counts channels, although there are half as many pairs. transformers and vLLM have the same bound.
    start, end = max(start, 0), min(end, num_channels - 1)
    # An empty ramp would divide by zero.
    width = (end - start) or 0.001
    divided_share = ((pairs - start) / width).clip(0, 1)
    return divided * divided_share + plain * (1 - divided_share)
