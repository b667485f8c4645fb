"""Activations: tensors that a pass keeps of its rows until the gradients are made, and those that come and go.

Counted are the tensors that autograd saves, layer by layer, each storage once: for Megatron's local spec with this
package's norm and attention, and for Transformer Engine's spec. A rank's tokens are those of a row over its
context-parallel ranks; norms and residuals are split over tensor-parallel ranks under sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megarl.config.parallel import ParallelConfig
from megarl.families.shape import ModelShape, padded_vocab_size

FLOAT32 = 4
EXPERT_IMBALANCE = 1.25
"""Tokens of the fullest expert-parallel rank over the mean. (A guess: routers are trained without balancing.)"""

_NUMBERS = 64
"""Bytes a token of log-probs, labels and the loss."""

Spec = Literal["local", "transformer_engine"]


@dataclass(frozen=True, slots=True)
class PassSettings:
    """How rows are passed through a model."""

    row_tokens: int
    """Tokens of a packed row, over all context-parallel ranks."""
    chunk_tokens: int
    """Tokens whose logits are made at once."""
    itemsize: int
    sequence_parallel: bool
    spec: Spec
    recomputes_layers: bool = False
    """Whether whole layers are computed anew."""
    recomputed: frozenset[str] = frozenset()
    """Parts of a layer that are computed anew, by Megatron-Core's names."""
    fuses_activation: bool = False
    """Whether SwiGLU is one kernel (bias_activation_fusion)."""
    pads_attention: bool = False
    """Whether attention runs on padded sequences: on a CPU, and in float32."""
    lora_rank: int = 0
    """Of the adapters that alone are trained; 0: the weights are."""
    longest: int = 1
    """Tokens of the longest sequence in a row."""
    expert_load: float = EXPERT_IMBALANCE
    """Tokens of the fullest expert-parallel rank over the mean."""


@dataclass(frozen=True, slots=True)
class Widths:
    """Channels of one token on a rank."""

    hidden: int
    query: int
    key: int
    """Of all keys; values have as many."""
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    rows: int
    """Rows of the vocabulary."""


def widths(shape: ModelShape, layout: ParallelConfig) -> Widths:
    """The channels of a model's tokens on one of the ranks of a layout."""
    heads, kv_heads = shape.num_heads // layout.tp, max(1, shape.num_kv_heads // layout.tp)
    return Widths(
        hidden=shape.hidden_size,
        query=heads * shape.head_dim,
        key=kv_heads * shape.head_dim,
        feed_forward=shape.intermediate_size // layout.tp,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=shape.head_dim,
        rows=0 if shape.has_value_head else padded_vocab_size(shape.vocab_size, layout.tp) // layout.tp,
    )


def layer_bytes(shape: ModelShape, layout: ParallelConfig, settings: PassSettings) -> float:
    """Bytes that autograd saves in one layer for one row, but of its recomputed parts."""
    attention = _attention(shape, widths(shape, layout), layout, settings)
    feed_forward = _experts(shape, layout, settings) if shape.num_experts else _dense(shape, layout, settings)
    return attention + feed_forward


def stage_bytes(shape: ModelShape, layout: ParallelConfig, stage: int, settings: PassSettings) -> float:
    """Bytes saved on a pipeline stage at its fullest: of all rows in flight, in all its layers, and the head's."""
    layers = shape.num_layers // layout.pp
    rows = rows_in_flight(layout, stage)
    layer = layer_bytes(shape, layout, settings)
    head = _head(shape, layout, settings) if stage == layout.pp - 1 else 0
    if settings.recomputes_layers:
        # The head's are let go of before the first layer is computed anew; the angles of all tokens are kept.
        angles = rows * _tokens(layout, settings) * shape.head_dim * FLOAT32
        own = _layer_input(shape, layout, settings)
        # The norm of a float32 layer reads that input where it is.
        shared = own if settings.itemsize == FLOAT32 else 0
        return rows * layers * own + angles + max(layer - shared, head)
    # Of one layer at a time, one part after the other is there again; the head's are let go of by then.
    parts = (replace(settings, recomputed=settings.recomputed - {part}) for part in settings.recomputed)
    again = max((layer_bytes(shape, layout, other) - layer for other in parts), default=0)
    return rows * layers * layer + max(head, again)


def pipeline_bytes(shape: ModelShape, layout: ParallelConfig, stage: int, settings: PassSettings) -> float:
    """Bytes of the hidden states that came from the stage before, of all rows in flight."""
    if layout.pp == 1:
        return 0.0
    return rows_in_flight(layout, stage) * layout.vpp * _layer_input(shape, layout, settings)


def rows_in_flight(layout: ParallelConfig, stage: int) -> float:
    """Rows whose activations a stage keeps at its fullest, in units of all its layers.

    One forward, one backward: as many as there are stages from here on. Interleaved: (pp - 1) / (pp vpp) more. Source:
    Megatron-LM (arXiv 2104.04473, section 2.2).
    """
    if layout.vpp == 1:
        return float(layout.pp - stage)
    chunks = (layout.pp - stage - 1) * 2 + (layout.vpp - 1) * layout.pp + 1
    return chunks / layout.vpp


def logits_bytes(shape: ModelShape, layout: ParallelConfig, settings: PassSettings) -> float:
    """Bytes of the logits that are in memory at once: as the head gives them, and two in float32."""
    if shape.has_value_head:
        return 0
    tokens = min(settings.chunk_tokens, settings.row_tokens // layout.cp)
    return tokens * widths(shape, layout).rows * (settings.itemsize + 2 * FLOAT32)


def backward_bytes(shape: ModelShape, layout: ParallelConfig, settings: PassSettings) -> float:
    """Bytes of gradients that come and go in the widest place of a backward pass: a feed-forward layer's."""
    size, tokens = settings.itemsize, _tokens(layout, settings)
    if shape.num_experts:
        routed = _routed_tokens(shape, layout, settings)
        channels = shape.moe_intermediate_size // layout.etp
        return (
            routed * (_gated(channels, settings) + 2 * shape.hidden_size) * size + 2 * tokens * shape.hidden_size * size
        )
    at = widths(shape, layout)
    return tokens * (_gated(at.feed_forward, settings) + 2 * at.hidden) * size


def forward_bytes(shape: ModelShape, layout: ParallelConfig, settings: PassSettings) -> float:
    """Bytes of a pass without gradients beside the logits: one layer's tensors, in its feed-forward part."""
    size, tokens = settings.itemsize, _tokens(layout, settings)
    residual = 2 * tokens * shape.hidden_size * size / _split(layout, settings)
    whole = tokens * shape.hidden_size * size
    if shape.num_experts:
        routed = _routed_tokens(shape, layout, settings)
        channels = 4 * shape.moe_intermediate_size // layout.etp
        return residual + whole + routed * (channels + 2 * shape.hidden_size) * size
    return residual + whole + tokens * 4 * widths(shape, layout).feed_forward * size


def _tokens(layout: ParallelConfig, settings: PassSettings) -> int:
    """A rank's tokens of a row."""
    return settings.row_tokens // layout.cp


def _split(layout: ParallelConfig, settings: PassSettings) -> int:
    """The ranks that norms and residuals are split over."""
    return layout.tp if settings.sequence_parallel else 1


def _layer_input(shape: ModelShape, layout: ParallelConfig, settings: PassSettings) -> float:
    return _tokens(layout, settings) * shape.hidden_size * settings.itemsize / _split(layout, settings)


def _norm(layout: ParallelConfig, settings: PassSettings, width: int, *, is_fused: bool) -> float:
    """A norm and the input of the layer behind it; Transformer Engine's linear layer has it inside if `is_fused`."""
    size, tokens = settings.itemsize, _tokens(layout, settings) / _split(layout, settings)
    if "layernorm" in settings.recomputed and not (is_fused and settings.spec == "transformer_engine"):
        # Its input, the residual, is kept; its output is made again before the next layer's gradient.
        return tokens * width * size
    if settings.spec == "transformer_engine":
        return tokens * (2 * width * size + FLOAT32)
    # In float32: the input (a copy, unless it is float32) and one over its root mean square; then as normalised, for
    # the gradient of its weight, and as scaled.
    normed = 0 if settings.lora_rank else size
    return tokens * (width * (FLOAT32 + normed + size) + FLOAT32)


def _attention(shape: ModelShape, at: Widths, layout: ParallelConfig, settings: PassSettings) -> float:
    size, tokens = settings.itemsize, _tokens(layout, settings)
    kept = _norm(layout, settings, at.hidden, is_fused=True)
    # The fused projection lives on in its views, that of all ranks where these are more than the key-value heads;
    # queries of several groups are copied out of it. Core attention that is computed anew keeps its values there.
    is_gathered = shape.num_kv_heads < layout.tp
    fused = (shape.num_heads + 2 * shape.num_kv_heads) * at.head_dim if is_gathered else at.query + 2 * at.key
    is_recomputed = "core_attn" in settings.recomputed
    if settings.spec == "transformer_engine" or layout.cp == 1 or size == FLOAT32 or is_recomputed:
        kept += tokens * fused * size
    copied = at.query if at.kv_heads > 1 and at.heads != at.kv_heads else 0
    if shape.qk_norm:
        kept += tokens * _head_norms(at, settings, copied)
    if settings.spec == "local":
        kept += tokens * 4 * at.head_dim * size  # cosines and sines, of queries and of keys
    # Queries and keys as rotated, and the output, which is the next linear layer's input.
    kept += tokens * (at.query + 2 * settings.lora_rank) * size
    return kept + _core(at, layout, settings)


def _head_norms(at: Widths, settings: PassSettings, copied: int) -> float:
    """Bytes a token of the norms of queries and keys, whose results rotary embeddings do not keep."""
    size = settings.itemsize
    statistics = FLOAT32 * (at.heads + at.kv_heads)
    if settings.spec == "transformer_engine":
        return copied * size + statistics
    # In float32 keys are read where they are; in other types the input is a copy.
    inputs = copied if size == FLOAT32 else at.query + at.key
    normed = 0 if settings.lora_rank else size
    return FLOAT32 * inputs + (at.query + at.key) * normed + statistics


def _core(at: Widths, layout: ParallelConfig, settings: PassSettings) -> float:
    """Bytes of core attention: what it is given, and what it keeps of its own."""
    size, tokens = settings.itemsize, _tokens(layout, settings)
    given = tokens * (at.query + at.key) * size
    if "core_attn" in settings.recomputed:
        return given
    if layout.cp > 1 and settings.spec == "local":
        # Keys and values of all ranks; two parts of a rank's queries see (2 cp + 1) / (2 cp) of them together.
        seen = tokens * layout.cp * (2 * layout.cp + 1) / (2 * layout.cp)
        own = tokens * at.query * size + 2 * seen * at.key * size
        if not settings.pads_attention:
            return own + tokens * FLOAT32 * at.heads
        chunk = settings.longest / (2 * layout.cp)
        masks = settings.row_tokens / settings.longest * chunk * chunk * (2 * layout.cp + 1) * size
        return 2 * own + masks + tokens * (at.query * size + FLOAT32 * at.heads)
    return given + _inside_core(at, layout, settings)


def _inside_core(at: Widths, layout: ParallelConfig, settings: PassSettings) -> float:
    """Bytes that core attention keeps beside its inputs and its output."""
    size, tokens = settings.itemsize, _tokens(layout, settings)
    if settings.pads_attention:
        return tokens * ((2 * at.query + 2 * at.key) * size + FLOAT32 * at.heads)
    values = at.key * size if settings.spec == "transformer_engine" else 0
    return tokens * (values + FLOAT32 * at.heads)


def _dense(shape: ModelShape, layout: ParallelConfig, settings: PassSettings) -> float:
    channels = widths(shape, layout).feed_forward * settings.itemsize
    norm = _norm(layout, settings, shape.hidden_size, is_fused=True)
    if "mlp" in settings.recomputed:
        # Transformer Engine's has the norm inside, so that only the residual is kept.
        return norm if settings.spec == "local" else _layer_input(shape, layout, settings)
    return norm + _tokens(layout, settings) * (_gated(channels, settings) + 2 * settings.lora_rank * settings.itemsize)


def _gated(channels: float, settings: PassSettings) -> float:
    """Bytes of a gated layer with so many bytes of channels.

    Gate and up, and their product; where it is not fused, also the activated gate, and up with Megatron's offset.
    """
    return (3 if settings.fuses_activation else 5) * channels


def _routed_tokens(shape: ModelShape, layout: ParallelConfig, settings: PassSettings) -> float:
    """Tokens that a rank's experts take of one row, each as often as it has experts here."""
    # All ranks of an expert-parallel group bring their tokens, split over tensor-parallel ranks, and share them out;
    # the ranks that split an expert all have its tokens.
    own = _tokens(layout, settings) / _split(layout, settings)
    load = settings.expert_load if layout.ep > 1 else 1.0
    return own * layout.etp * shape.top_k * load


def _experts(shape: ModelShape, layout: ParallelConfig, settings: PassSettings) -> float:
    size = settings.itemsize
    own = _tokens(layout, settings) / _split(layout, settings)
    channels = shape.moe_intermediate_size // layout.etp * size
    total = _norm(layout, settings, shape.hidden_size, is_fused=False)
    if "moe" in settings.recomputed:
        return total
    # The router in float32: logits, their softmax, the map; and indices of the permutation.
    total += own * (3 * shape.num_experts * FLOAT32 + 4 * shape.top_k * 8)
    # As dispatched, then through the expert, whose product is kept before it is weighed by its probability, too.
    weighed = 0 if settings.fuses_activation else channels
    inside = (shape.hidden_size + 2 * settings.lora_rank) * size
    activated = 2 * channels if "moe_act" in settings.recomputed else _gated(channels, settings) + weighed
    total += _routed_tokens(shape, layout, settings) * (inside + activated)
    if shape.shared_intermediate_size and "shared_experts" not in settings.recomputed:
        shared = shape.shared_intermediate_size // layout.tp * size
        total += _tokens(layout, settings) * _gated(shared, settings) + own * shape.hidden_size * size
    return total


def _head(shape: ModelShape, layout: ParallelConfig, settings: PassSettings) -> float:
    """The last norm, the hidden states of all tokens, and what log-probs keep of each."""
    size, tokens = settings.itemsize, _tokens(layout, settings)
    split = _split(layout, settings)
    gathered = tokens * shape.hidden_size * size
    normed = 0 if settings.lora_rank else size
    return tokens / split * shape.hidden_size * (FLOAT32 + normed) + gathered + tokens * _NUMBERS
