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

    `exponents` are the even numbers below num_channels, divided by it. `pairs` numbers the pairs from 0.
    """
    frequencies = 1.0 / rotary.theta**exponents
    if rotary.scaling == "linear":
        return frequencies / rotary.factor
    if rotary.scaling == "llama3":
        return _scale_as_llama3(frequencies, rotary, where)
    if rotary.scaling == "yarn":
        slowed_frequencies = 1.0 / (rotary.factor * rotary.theta**exponents)
        return _scale_as_yarn(frequencies, slowed_frequencies, pairs, rotary, num_channels)
    return frequencies


def _scale_as_llama3(frequencies: Array, rotary: Rotary, where: Where) -> Array:
    """Return Llama 3.1's frequencies [pairs]: long wavelengths are divided by the factor, medium ones interpolated."""
    wavelengths = 2 * math.pi / frequencies
    longest = rotary.original_positions / rotary.low_factor
    shortest = rotary.original_positions / rotary.high_factor
    unscaled_share = (rotary.original_positions / wavelengths - rotary.low_factor) / (
        rotary.high_factor - rotary.low_factor
    )
    interpolated = (1 - unscaled_share) * frequencies / rotary.factor + unscaled_share * frequencies
    scaled = where(wavelengths > longest, frequencies / rotary.factor, interpolated)
    return where(wavelengths < shortest, frequencies, scaled)


def _scale_as_yarn(
    fast_frequencies: Array, slow_frequencies: Array, pairs: Array, rotary: Rotary, num_channels: int
) -> Array:
    """Return YaRN's frequencies [pairs] (arXiv:2309.00071, section 3.2).

    Fast pairs keep `fast_frequencies`, slow pairs get `slow_frequencies`, and pairs between them a linear mixture.
    """

    def find_pair(rotations: float) -> float:
        """Return the index, not rounded, of the channel pair that rotates so often over the original context."""
        positions_per_radian = rotary.original_positions / (rotations * 2 * math.pi)
        return num_channels * math.log(positions_per_radian) / (2 * math.log(rotary.theta))

    first_slowed_pair, last_mixed_pair = find_pair(rotary.beta_fast), find_pair(rotary.beta_slow)
    if rotary.truncate:
        first_slowed_pair, last_mixed_pair = math.floor(first_slowed_pair), math.ceil(last_mixed_pair)
    # The bound counts channels, although there are half as many pairs. transformers and vLLM have the same bound.
    first_slowed_pair, last_mixed_pair = max(first_slowed_pair, 0), min(last_mixed_pair, num_channels - 1)
    # An empty ramp would divide by zero.
    ramp_width = (last_mixed_pair - first_slowed_pair) or 0.001
    divided_share = ((pairs - first_slowed_pair) / ramp_width).clip(0, 1)
    return slow_frequencies * divided_share + fast_frequencies * (1 - divided_share)
