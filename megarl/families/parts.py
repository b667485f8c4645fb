"""Parts of a model's shape: attention, router, and the kind of each layer. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from megarl.families.config_json.rotary import Rotary
from megarl.families.linear_attention import LinearAttention


class LayerKind(NamedTuple):
    """Kind of a transformer layer: attention and feed-forward network. Layers of one kind share a spec in Megatron."""

    mixer: Literal["attention", "linear_attention"] = "attention"
    has_experts: bool = False
    """Whether the feed-forward layer is a mixture of experts."""
    window: int = 0
    """Attention window in tokens, including the token itself. 0: no window."""


@dataclass(frozen=True, slots=True)
class GroupedQuery:
    """Sizes of grouped-query attention. `Latent` has the same attributes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    """Whether the query, key and value projections have biases."""
    qk_norm: bool = False
    """Whether each query and key head has an RMSNorm."""
    has_output_gate: bool = False
    """Whether the query projection also computes a gate per query head, which scales the head's output."""

    @property
    def score_channels(self) -> int:
        """Query channels of all heads: the multiply-adds of a token pair's attention scores."""
        return self.num_heads * self.head_dim

    @property
    def value_channels(self) -> int:
        """Channels of the attention's output, before the output projection."""
        return self.num_heads * self.head_dim

    @property
    def rotary_channels(self) -> int:
        """Rotating channels of a head at rotary fraction 1."""
        return self.head_dim

    def projection_elements(self, hidden_size: int) -> int:
        """Return the number of weights in a layer's projections: query with gate, key, value, output; no biases."""
        gates = self.num_heads if self.has_output_gate else 0
        return hidden_size * (2 * (self.num_heads + self.num_kv_heads) + gates) * self.head_dim

    def cached_numbers(self, tp: int) -> int:
        """Return the numbers per token and layer in the KV cache of one engine rank. `tp` is the engine's number of
        ranks.
        """
        # With more ranks than key-value heads, each rank holds a copy of one head. Factor 2: keys and values.
        return 2 * max(1, self.num_kv_heads // tp) * self.head_dim


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (arXiv:2405.04434, section 2.1): keys and values are projected from a latent vector.

    Only `rotary_channels` of a query or key head have rotary embeddings.
    """

    num_heads: int
    query_rank: int
    """Channels of the queries' latent vector. 0: none, queries are projected from the hidden states."""
    kv_rank: int
    """Channels of the latent vector of keys and values."""
    plain_channels: int
    """Channels of a query or key head without rotary embeddings."""
    rotary_channels: int
    """Channels of a query or key head with rotary embeddings. All key heads share them."""
    value_head_dim: int
    """Channels of a value head."""

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def head_dim(self) -> int:
        """Channels of a query or key head."""
        return self.plain_channels + self.rotary_channels

    @property
    def qkv_bias(self) -> bool:
        return False

    @property
    def has_output_gate(self) -> bool:
        return False

    @property
    def qk_norm(self) -> bool:
        """True: Megatron-Core normalises the latent vectors only if its field qk_layernorm is set."""
        return True

    @property
    def score_channels(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def value_channels(self) -> int:
        return self.num_heads * self.value_head_dim

    def projection_elements(self, hidden_size: int) -> int:
        """Return the number of weights in a layer's projections, including those to and from the latent vectors.

        With `query_rank` 0, queries have one direct projection.
        """
        query_channels = self.num_heads * self.head_dim
        direct_elements = hidden_size * query_channels
        latent_elements = self.query_rank * (hidden_size + query_channels)
        key_elements = hidden_size * (self.kv_rank + self.rotary_channels)
        raised_elements = self.kv_rank * self.num_heads * (self.plain_channels + self.value_head_dim)
        return (
            (latent_elements if self.query_rank else direct_elements)
            + key_elements
            + raised_elements
            + hidden_size * self.value_channels
        )

    def cached_numbers(self, tp: int) -> int:
        # vLLM caches the latent vector, not heads, so every rank holds all of it.
        return self.kv_rank + self.rotary_channels


@dataclass(frozen=True, slots=True)
class Router:
    """Router of a mixture of experts, and the sizes of its experts."""

    num_experts: int
    top_k: int
    """Number of routed experts per token."""
    moe_intermediate_size: int
    """Intermediate size of a routed expert."""
    norm_topk_prob: bool = True
    """Whether the routing weights of a token's experts sum to one."""
    shared_intermediate_size: int = 0
    """Intermediate size of the shared expert. 0: no shared expert."""
    has_shared_gate: bool = False
    """Whether a gate scales the shared expert's output."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns the router's logits into scores."""
    has_bias: bool = False
    """Whether experts are chosen by score plus a float32 bias per expert. The routing weights exclude the bias."""
    scale: float = 1.0
    """Factor of the routing weights."""
    num_groups: int = 1
    """Number of groups of experts. The router chooses groups for each token, then experts in these groups."""
    top_groups: int = 1
    """Number of groups chosen for each token."""


class Parts(NamedTuple):
    attention: GroupedQuery | Latent
    rotary: Rotary
    router: Router | None = None
    kinds: tuple[LayerKind, ...] = ()
    """Kind of each layer. Empty: no layer has a window, and all have experts if the model has a router."""
    num_kept_layers: int = 0
    """Number of draft layers (`families.draft_layers`) in the checkpoint, copied unchanged."""
    linear_attention: LinearAttention | None = None
    """Sizes of the linear attention. None: no layer has linear attention."""
    has_zero_centered_norms: bool = False
    """Whether norms multiply by 1 + weight."""
