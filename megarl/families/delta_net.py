"""Gated delta-nets (arXiv:2412.06464): linear attention with a state per value head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.families.linear_attention import LinearAttention

_CHUNK_TOKENS = 64
"""Tokens of a chunk in the chunked rule, in torch and in FLA's kernels."""


@dataclass(frozen=True, slots=True)
class DeltaNet(LinearAttention):
    """Sizes of a model's gated delta-nets."""

    plural = "delta-nets"
    tensor_part = "linear_attn"
    megatron_lm_variant = "gated_delta_net"
    kernels = ("fla", "flash-linear-attention")
    # As in Megatron-Core 0.16.1.
    sums_norm_gradient = False

    num_key_heads: int
    """Number of query heads and of key heads. Each serves num_value_heads / num_key_heads value heads."""
    num_value_heads: int
    key_dim: int
    """Channels of a query or key head."""
    value_dim: int
    """Channels of a value head."""
    width: int
    """Tokens read by the causal convolution, including the current one."""

    @property
    def key_channels(self) -> int:
        """Key channels of all heads, equal to the query channels."""
        return self.num_key_heads * self.key_dim

    @property
    def value_channels(self) -> int:
        """Value channels of all heads, equal to those of the output gates."""
        return self.num_value_heads * self.value_dim

    @property
    def convolved_channels(self) -> int:
        return 2 * self.key_channels + self.value_channels

    @property
    def state_numbers(self) -> int:
        return self.num_value_heads * self.key_dim * self.value_dim

    @property
    def num_split_heads(self) -> int:
        return self.num_key_heads

    @property
    def split_heads(self) -> str:
        return f"key heads of the {self.plural}"

    @property
    def config_sizes(self) -> Mapping[str, int]:
        return {"linear_num_key_heads": self.num_key_heads, "linear_num_value_heads": self.num_value_heads}

    def megatron_settings(self) -> dict[str, Any]:
        return {
            "linear_conv_kernel_dim": self.width,
            "linear_key_head_dim": self.key_dim,
            "linear_value_head_dim": self.value_dim,
            "linear_num_key_heads": self.num_key_heads,
            "linear_num_value_heads": self.num_value_heads,
        }

    def count_multiply_adds(self, hidden_size: int) -> int:
        # The projections make queries, keys, values, gates, two rates per value head, and the output.
        inputs = self.convolved_channels + self.value_channels + 2 * self.num_value_heads
        # A state is read for the key, written, and read for the query: arXiv:2412.06464, eq. 10.
        state_products = 3 * self.state_numbers
        convolution_products = self.width * self.convolved_channels
        return hidden_size * (inputs + self.value_channels) + state_products + convolution_products

    def saved_numbers_per_token(self, *, in_torch: bool) -> tuple[float, float]:
        """Return how many numbers the backward pass needs per token, in the model's dtype and in float32."""
        # An estimate from the operations, not measured. Factors count tensors of the same size.
        heads, chunk_tokens = self.num_value_heads, _CHUNK_TOKENS
        # Keys, like queries, are repeated for the value heads.
        key_numbers, value_numbers = heads * self.key_dim, self.value_channels
        # Output of the input projection: convolved channels, gates, a decay and a rate per head.
        projected = self.convolved_channels + value_numbers + 2 * heads
        # Input and output of the convolution; queries and keys; values, outputs and gated outputs.
        in_dtype = projected + 2 * self.convolved_channels + 2 * key_numbers + 3 * value_numbers
        # Decays and rates; the products inside a chunk; one state per chunk; outputs before and after their norm.
        in_float32 = 2 * heads + heads * chunk_tokens + self.state_numbers / chunk_tokens + 2 * value_numbers
        if in_torch:
            # Shifted inputs of the convolution; normalised and decayed queries and keys; further values.
            in_float32 += 5 * self.convolved_channels + 6 * key_numbers + 4 * value_numbers
            # Further products inside a chunk, and a second copy of the states.
            in_float32 += 4 * heads * chunk_tokens + self.state_numbers / chunk_tokens
        return in_dtype, in_float32
