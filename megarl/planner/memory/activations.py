"""Bytes of activations on a rank: tensors saved by autograd for the backward pass, and temporary tensors.

A row is a packed micro-batch. Each context-parallel rank has an equal part of its tokens. Each storage counts once. The
formulas cover two implementations of a layer: Megatron's local spec with megarl's norm and attention, and Transformer
Engine's spec. With sequence parallelism, norms and residuals are split over tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from megarl.config.parallel import ParallelConfig
from megarl.families.linear_attention import LinearAttention
from megarl.families.logprob_chunks import logit_bytes
from megarl.families.parts import Latent, LayerKind
from megarl.families.shape import ModelShape, padded_vocab_size

FLOAT32 = 4
EXPERT_IMBALANCE = 1.25
"""Assumed tokens on the fullest expert-parallel rank, divided by the mean. A guess for routers trained without load
balancing.
"""

_LOSS_BYTES = 64
"""Bytes per token of log-probs, labels and the loss."""

_FORWARD_TENSORS = 4
"""Number of tensors in a gated feed-forward layer's forward pass: gate, up, activated gate, their product."""

Spec = Literal["local", "transformer_engine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings:
    """Sizes and recomputation of a pass of packed rows through a model."""

    row_tokens: int
    """Tokens of a packed row, over all context-parallel ranks."""
    chunk_tokens: int
    """Tokens per chunk of logits."""
    keeps_logits: bool = False
    """Whether the logits of a whole row are stored for the backward pass (`trainer.keep_logits`)."""
    itemsize: int
    sequence_parallel: bool
    spec: Spec
    recomputes_layers: bool = False
    """Whether whole layers are recomputed in the backward pass."""
    recomputed: frozenset[str] = frozenset()
    """Recomputed parts of a layer, by Megatron-Core's names."""
    fuses_activation: bool = False
    """Whether SwiGLU is computed by one fused kernel (bias_activation_fusion)."""
    pads_attention: bool = False
    """Whether attention pads the sequences of a row: on a CPU, and in float32."""
    shares_prefixes: bool = False
    """Whether a row is a tree that stores each shared prefix once. `row_tokens` then counts the prefix once."""
    lora_rank: int = 0
    """Rank of the LoRA adapters. Above 0, only adapters are trained; 0: all weights are."""
    has_logit_kernels: bool = False
    """Whether kernels read the logits in their own type (`models.logit_kernels`). False: torch copies them to
    float32.
    """
    longest: int = 1
    """Tokens of the longest sequence in a row."""
    expert_load: float = EXPERT_IMBALANCE
    """Tokens on the fullest expert-parallel rank, divided by the mean over ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Channels per token on a rank."""

    hidden: int
    query: int
    key: int
    """Channels of all keys on the rank. The values have as many."""
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary_rows: int
    """Rows of the padded vocabulary; 0 for a value head."""


def widths(shape: ModelShape, parallel: ParallelConfig) -> Widths:
    """Return a model's channels per token on one tensor-parallel rank."""
    # A rank holds at least one key-value head. If ranks outnumber the heads, heads are copied.
    heads, kv_heads = shape.num_heads // parallel.tp, max(1, shape.num_kv_heads // parallel.tp)
    return Widths(
        hidden=shape.hidden_size,
        query=heads * shape.head_dim,
        key=kv_heads * shape.head_dim,
        feed_forward=shape.intermediate_size // parallel.tp,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=shape.head_dim,
        vocabulary_rows=0 if shape.has_value_head else padded_vocab_size(shape.vocab_size, parallel.tp) // parallel.tp,
    )


def layer_bytes(shape: ModelShape, parallel: ParallelConfig, settings: PassSettings, kind: LayerKind) -> float:
    """Return the bytes that autograd saves in one layer for one row, without recomputed parts."""
    attention = (
        _linear_attention_bytes(shape.linear_attention, shape.hidden_size, parallel, settings)
        if kind.mixer == "linear_attention" and shape.linear_attention
        else _attention_bytes(shape, widths(shape, parallel), parallel, settings)
    )
    feed_forward = (
        _expert_bytes(shape, parallel, settings) if kind.has_experts else _dense_bytes(shape, parallel, settings)
    )
    return attention + feed_forward


def stage_bytes(shape: ModelShape, parallel: ParallelConfig, stage: int, settings: PassSettings) -> float:
    """Return the peak bytes that autograd saves on a pipeline stage.

    The layers save tensors of all rows in flight, the output head of one row.
    """
    layer_kinds = [shape.layers[layer_number] for layer_number in parallel.layers_on_stage(shape.num_layers, stage)]
    num_rows = rows_in_flight(parallel, stage)
    bytes_by_kind = {kind: layer_bytes(shape, parallel, settings, kind) for kind in set(layer_kinds)}
    largest_layer_bytes = max(bytes_by_kind.values())
    is_last = stage == parallel.pp - 1
    head_bytes = _head_bytes(shape, parallel, settings) if is_last else 0
    if is_last and shape.num_draft_layers:
        # The draft layer, like the head, holds tensors of a single row: the row whose loss is computed.
        head_bytes += _draft_layer_bytes(shape, parallel, settings)
    if settings.recomputes_layers:
        # The head's tensors are freed before the first layer is recomputed. The rotary angles of all tokens remain.
        angle_bytes = num_rows * _count_rank_tokens(parallel, settings) * shape.rotary_channels * FLOAT32
        layer_input_bytes = _layer_input_bytes(shape, parallel, settings)
        # In float32 the norm reads the layer's input in place. In other types it saves a copy.
        bytes_in_place = layer_input_bytes if settings.itemsize == FLOAT32 else 0
        return (
            num_rows * len(layer_kinds) * layer_input_bytes
            + angle_bytes
            + max(largest_layer_bytes - bytes_in_place, head_bytes)
        )
    # The bytes of a part: a layer that saves it, minus a layer that recomputes it. One part of one layer is recomputed
    # at a time, after the head's tensors are freed. So take the maximum.
    saving_one_part = (replace(settings, recomputed=settings.recomputed - {part}) for part in settings.recomputed)
    recomputed_bytes = max(
        (
            layer_bytes(shape, parallel, part_settings, kind) - bytes_by_kind[kind]
            for part_settings in saving_one_part
            for kind in bytes_by_kind
        ),
        default=0,
    )
    return num_rows * sum(bytes_by_kind[kind] for kind in layer_kinds) + max(head_bytes, recomputed_bytes)


def pipeline_bytes(shape: ModelShape, parallel: ParallelConfig, stage: int, settings: PassSettings) -> float:
    """Return the bytes of hidden states from the previous pipeline stage, for all rows in flight."""
    if parallel.pp == 1:
        return 0.0
    return rows_in_flight(parallel, stage) * parallel.vpp * _layer_input_bytes(shape, parallel, settings)


def carried_bytes(
    shape: ModelShape, parallel: ParallelConfig, stage: int, settings: PassSettings, layers: Collection[int]
) -> float:
    """Return the bytes of layer inputs that a stage receives for a drafter on the last stage.

    The drafter reads the inputs of `layers` (from 0); a stage receives the inputs of layers in earlier chunks. They
    stay for all rows in flight.
    """
    chunks = parallel.layers_of_chunks(shape.num_layers, stage)
    num_received = sum(layer_number < chunk.start for chunk in chunks for layer_number in layers)
    return rows_in_flight(parallel, stage) * num_received * _layer_input_bytes(shape, parallel, settings)


def rows_in_flight(parallel: ParallelConfig, stage: int) -> float:
    """Return the maximum number of rows with activations on a pipeline stage.

    A row counts as 1 if all layers of the stage hold its activations. 1F1B schedule: one row for each stage from this
    one to the last. Interleaved schedule: (pp - 1) / (pp vpp) rows more on the first stage. Source: Megatron-LM (arXiv
    2104.04473, section 2.2).
    """
    if parallel.vpp == 1:
        return float(parallel.pp - stage)
    chunks_in_flight = (parallel.pp - stage - 1) * 2 + (parallel.vpp - 1) * parallel.pp + 1
    return chunks_in_flight / parallel.vpp


def logits_bytes(shape: ModelShape, parallel: ParallelConfig, settings: PassSettings) -> float:
    """Return the bytes of logits in memory at once: the head's output, and without kernels two float32 copies.

    Each copy has one chunk, even if the logits of a whole row are stored.
    """
    if shape.has_value_head:
        return 0
    row_tokens = settings.row_tokens // parallel.cp
    chunk_tokens = min(settings.chunk_tokens, row_tokens)
    bytes_per_logit = logit_bytes(settings.itemsize, has_kernels=settings.has_logit_kernels)
    stored_bytes = (row_tokens - chunk_tokens) * settings.itemsize if settings.keeps_logits else 0
    return (chunk_tokens * bytes_per_logit + stored_bytes) * widths(shape, parallel).vocabulary_rows


def backward_bytes(shape: ModelShape, parallel: ParallelConfig, settings: PassSettings) -> float:
    """Return the bytes of temporary gradients in a feed-forward layer, the widest part of the backward pass."""
    size, tokens = settings.itemsize, _count_rank_tokens(parallel, settings)
    rank_widths, layer_bytes_by_kind = widths(shape, parallel), []
    if any(kind.has_experts for kind in shape.layers):
        routed_tokens = _count_routed_tokens(shape, parallel, settings)
        channels = shape.moe_intermediate_size // parallel.etp
        expert_bytes = routed_tokens * (_gated_size(channels, settings) + 2 * shape.hidden_size) * size
        # Gradients of the layer's input and output, before tokens are sent to experts and after they return.
        layer_bytes_by_kind.append(expert_bytes + 2 * tokens * shape.hidden_size * size)
    if not all(kind.has_experts for kind in shape.layers):
        layer_bytes_by_kind.append(
            tokens * (_gated_size(rank_widths.feed_forward, settings) + 2 * rank_widths.hidden) * size
        )
    return max(layer_bytes_by_kind)


def forward_bytes(shape: ModelShape, parallel: ParallelConfig, settings: PassSettings) -> float:
    """Return the bytes of one layer's tensors in a forward pass without gradients, without logits."""
    size, tokens = settings.itemsize, _count_rank_tokens(parallel, settings)
    residual_bytes = 2 * tokens * shape.hidden_size * size / _count_sequence_parts(parallel, settings)
    hidden_state_bytes = tokens * shape.hidden_size * size
    layer_bytes_by_kind = []
    if any(kind.has_experts for kind in shape.layers):
        routed_tokens = _count_routed_tokens(shape, parallel, settings)
        expert_channels = _FORWARD_TENSORS * shape.moe_intermediate_size // parallel.etp
        layer_bytes_by_kind.append(routed_tokens * (expert_channels + 2 * shape.hidden_size) * size)
    if not all(kind.has_experts for kind in shape.layers):
        layer_bytes_by_kind.append(tokens * _FORWARD_TENSORS * widths(shape, parallel).feed_forward * size)
    return residual_bytes + hidden_state_bytes + max(layer_bytes_by_kind)


def _count_rank_tokens(parallel: ParallelConfig, settings: PassSettings) -> int:
    return settings.row_tokens // parallel.cp


def _count_sequence_parts(parallel: ParallelConfig, settings: PassSettings) -> int:
    return parallel.tp if settings.sequence_parallel else 1


def _layer_input_bytes(shape: ModelShape, parallel: ParallelConfig, settings: PassSettings) -> float:
    return (
        _count_rank_tokens(parallel, settings)
        * shape.hidden_size
        * settings.itemsize
        / _count_sequence_parts(parallel, settings)
    )


def _norm_bytes(parallel: ParallelConfig, settings: PassSettings, width: int, *, is_fused: bool) -> float:
    """Return the bytes saved by a norm, including the input of the linear layer after it.

    `is_fused`: Transformer Engine's linear layer contains the norm.
    """
    size, tokens = settings.itemsize, _count_rank_tokens(parallel, settings) / _count_sequence_parts(parallel, settings)
    if "layernorm" in settings.recomputed and not (is_fused and settings.spec == "transformer_engine"):
        # Saves only its input, the residual. The output is recomputed before the next layer's gradient.
        return tokens * width * size
    if settings.spec == "transformer_engine":
        return tokens * (2 * width * size + FLOAT32)
    # Saved in float32: the input (a copy unless it is float32) and the inverse root mean square. Saved too: the
    # normalised values (for the weight's gradient) and the scaled values.
    normed_bytes = 0 if settings.lora_rank else size
    return tokens * (width * (FLOAT32 + normed_bytes + size) + FLOAT32)


def _attention_bytes(shape: ModelShape, width: Widths, parallel: ParallelConfig, settings: PassSettings) -> float:
    """Return the bytes saved by a layer's self-attention: norm, projections, rotary embeddings, core attention."""
    size, tokens = settings.itemsize, _count_rank_tokens(parallel, settings)
    if isinstance(shape.attention, Latent):
        return _latent_attention_bytes(shape.attention, width, parallel, settings)
    saved_bytes = _norm_bytes(parallel, settings, width.hidden, is_fused=True)
    # Views keep the fused projection in memory. If ranks outnumber the key-value heads, it holds the heads of all
    # ranks. Queries of several groups are copied out of it. Recomputed core attention reads its values from it.
    is_gathered = shape.num_kv_heads < parallel.tp
    fused_channels = (
        (shape.num_heads + 2 * shape.num_kv_heads) * width.head_dim if is_gathered else width.query + 2 * width.key
    )
    if shape.attention.has_output_gate:
        fused_channels += shape.num_heads * width.head_dim if is_gathered else width.query
        # Saves the gates' sigmoids in float32, and the gated output in addition to the output of core attention.
        saved_bytes += tokens * width.query * (FLOAT32 + size)
    is_recomputed = "core_attn" in settings.recomputed
    if settings.spec == "transformer_engine" or parallel.cp == 1 or size == FLOAT32 or is_recomputed:
        saved_bytes += tokens * fused_channels * size
    copied_query_channels = width.query if width.kv_heads > 1 and width.heads != width.kv_heads else 0
    if shape.attention.qk_norm:
        saved_bytes += tokens * _head_norm_bytes(width, settings, copied_query_channels)
    if settings.spec == "local":
        saved_bytes += tokens * 4 * shape.rotary_channels * size  # Cosines and sines, for queries and for keys.
    # Saves the output, the input of the next linear layer. `_core_attention_bytes` counts the rotated queries and keys.
    saved_bytes += tokens * (width.query + 2 * settings.lora_rank) * size
    return saved_bytes + _core_attention_bytes(width, parallel, settings)


def _latent_attention_bytes(
    attention: Latent, width: Widths, parallel: ParallelConfig, settings: PassSettings
) -> float:
    """Return the bytes saved by a layer's latent attention."""
    size, tokens = settings.itemsize, _count_rank_tokens(parallel, settings)
    saved_bytes = _norm_bytes(parallel, settings, width.hidden, is_fused=False)
    for rank in filter(None, (attention.query_rank, attention.kv_rank)):
        saved_bytes += _norm_bytes(parallel, settings, rank, is_fused=True) + tokens * rank * size
    unpacked_channels = width.heads * (attention.plain_channels + attention.value_head_dim)
    # Views keep the projected heads in memory. Queries and keys are copies, joined with rotated channels.
    saved_bytes += tokens * (width.query + unpacked_channels + width.heads * attention.value_head_dim) * size
    saved_bytes += tokens * (width.query + 2 * settings.lora_rank) * size
    return saved_bytes + _core_attention_bytes(width, parallel, settings)


def _linear_attention_bytes(
    linear: LinearAttention, hidden: int, parallel: ParallelConfig, settings: PassSettings
) -> float:
    """Return the bytes saved by linear attention.

    A rank has all tokens of some heads. This function counts some tokens of all heads, which are as many
    numbers.
    """
    tokens = _count_rank_tokens(parallel, settings) / parallel.tp
    # Attention pads on CPUs only. There the delta rule runs in plain torch, and saves more.
    num_in_dtype, num_in_float32 = linear.saved_numbers_per_token(in_torch=settings.pads_attention)
    saved_bytes = tokens * (num_in_dtype * settings.itemsize + num_in_float32 * FLOAT32)
    return _norm_bytes(parallel, settings, hidden, is_fused=True) + saved_bytes


def _head_norm_bytes(width: Widths, settings: PassSettings, copied_query_channels: int) -> float:
    """Return the bytes per token that the norms of queries and keys save. The rotary embeddings save nothing more.

    `copied_query_channels`: channels of queries copied out of the fused projection.
    """
    size = settings.itemsize
    statistics_bytes = FLOAT32 * (width.heads + width.kv_heads)
    if settings.spec == "transformer_engine":
        return copied_query_channels * size + statistics_bytes
    # In float32 the norm reads keys in place. In other types it saves a copy.
    input_channels = copied_query_channels if size == FLOAT32 else width.query + width.key
    normed_bytes = 0 if settings.lora_rank else size
    return FLOAT32 * input_channels + (width.query + width.key) * normed_bytes + statistics_bytes


def _core_attention_bytes(width: Widths, parallel: ParallelConfig, settings: PassSettings) -> float:
    """Return the bytes of core attention: its inputs, and the tensors it saves."""
    size, tokens = settings.itemsize, _count_rank_tokens(parallel, settings)
    input_bytes = tokens * (width.query + width.key) * size
    if "core_attn" in settings.recomputed:
        return input_bytes
    if settings.shares_prefixes:
        # On one rank, the values are part of the fused projection. Values gathered from several ranks are copies.
        copies_of_values = 2 * parallel.cp if parallel.cp > 1 else 1
        return tokens * (width.query + copies_of_values * width.key) * size + tokens * FLOAT32 * width.heads
    if parallel.cp > 1 and settings.spec == "local":
        # Keys and values of all ranks. A rank has two parts of the queries. Together they attend to (2 cp + 1) / (2 cp)
        # of the keys.
        attended_tokens = tokens * parallel.cp * (2 * parallel.cp + 1) / (2 * parallel.cp)
        gathered_bytes = tokens * width.query * size + 2 * attended_tokens * width.key * size
        if not settings.pads_attention:
            return gathered_bytes + tokens * FLOAT32 * width.heads
        chunk = settings.longest / (2 * parallel.cp)
        mask_bytes = settings.row_tokens / settings.longest * chunk * chunk * (2 * parallel.cp + 1) * size
        return 2 * gathered_bytes + mask_bytes + tokens * (width.query * size + FLOAT32 * width.heads)
    return input_bytes + _saved_core_bytes(width, parallel, settings)


def _saved_core_bytes(width: Widths, parallel: ParallelConfig, settings: PassSettings) -> float:
    """Return the bytes saved by core attention besides inputs and output."""
    size, tokens = settings.itemsize, _count_rank_tokens(parallel, settings)
    if settings.pads_attention:
        return tokens * ((2 * width.query + 2 * width.key) * size + FLOAT32 * width.heads)
    # One float32 per token and head: the log-sum-exp of the attention scores.
    value_bytes = width.key * size if settings.spec == "transformer_engine" else 0
    return tokens * (value_bytes + FLOAT32 * width.heads)


def _dense_bytes(shape: ModelShape, parallel: ParallelConfig, settings: PassSettings) -> float:
    """Return the bytes saved by a dense feed-forward layer and its norm."""
    channel_bytes = widths(shape, parallel).feed_forward * settings.itemsize
    norm_bytes = _norm_bytes(parallel, settings, shape.hidden_size, is_fused=True)
    if "mlp" in settings.recomputed:
        # Transformer Engine's layer contains the norm, so only the residual is saved.
        return norm_bytes if settings.spec == "local" else _layer_input_bytes(shape, parallel, settings)
    return norm_bytes + _count_rank_tokens(parallel, settings) * (
        _gated_size(channel_bytes, settings) + 2 * settings.lora_rank * settings.itemsize
    )


def _gated_size(channel_size: float, settings: PassSettings) -> float:
    """Return the size of what a gated feed-forward layer saves, if one activation has `channel_size` (bytes or
    numbers).

    Saved are gate, up and their product. Without a fused kernel, the activated gate is saved too, and the sum of up and
    Megatron's `glu_linear_offset`.
    """
    return (3 if settings.fuses_activation else 5) * channel_size


def _count_routed_tokens(shape: ModelShape, parallel: ParallelConfig, settings: PassSettings) -> float:
    """Return the tokens that a rank's experts process for one row. A token counts once per chosen expert."""
    # An expert-parallel group shares the tokens of all its ranks, which tensor parallelism splits. If ranks split an
    # expert, each of them receives all of its tokens.
    rank_tokens = _count_rank_tokens(parallel, settings) / _count_sequence_parts(parallel, settings)
    load = settings.expert_load if parallel.ep > 1 else 1.0
    return rank_tokens * parallel.etp * shape.top_k * load


def _expert_bytes(shape: ModelShape, parallel: ParallelConfig, settings: PassSettings) -> float:
    """Return the bytes saved by a layer of experts."""
    size = settings.itemsize
    rank_tokens = _count_rank_tokens(parallel, settings) / _count_sequence_parts(parallel, settings)
    channel_bytes = shape.moe_intermediate_size // parallel.etp * size
    saved_bytes = _norm_bytes(parallel, settings, shape.hidden_size, is_fused=False)
    if "moe" in settings.recomputed:
        return saved_bytes
    # The router in float32 (logits, softmax, map), and the int64 indices of the permutation.
    saved_bytes += rank_tokens * (3 * shape.num_experts * FLOAT32 + 4 * shape.top_k * 8)
    # Saves the dispatched tokens and the expert's activations. Without a fused kernel, the product is saved again
    # before it is scaled by its probability.
    weighted_bytes = 0 if settings.fuses_activation else channel_bytes
    input_bytes_per_token = (shape.hidden_size + 2 * settings.lora_rank) * size
    activation_bytes_per_token = (
        2 * channel_bytes if "moe_act" in settings.recomputed else _gated_size(channel_bytes, settings) + weighted_bytes
    )
    saved_bytes += _count_routed_tokens(shape, parallel, settings) * (
        input_bytes_per_token + activation_bytes_per_token
    )
    if shape.shared_intermediate_size and "shared_experts" not in settings.recomputed:
        shared_bytes = shape.shared_intermediate_size // parallel.tp * size
        saved_bytes += (
            _count_rank_tokens(parallel, settings) * _gated_size(shared_bytes, settings)
            + rank_tokens * shape.hidden_size * size
        )
    return saved_bytes


def _head_bytes(shape: ModelShape, parallel: ParallelConfig, settings: PassSettings) -> float:
    """Return the bytes that the head stores for the backward pass: last norm, hidden states, tensors for log-probs."""
    size, tokens = settings.itemsize, _count_rank_tokens(parallel, settings)
    sequence_parts = _count_sequence_parts(parallel, settings)
    # If shared prefixes are stored once, the head also copies a hidden state for each prediction, about one per token.
    gathered_bytes = tokens * shape.hidden_size * size * (2 if settings.shares_prefixes else 1)
    # The norm's weight is frozen with LoRA, so the normalised values for its gradient are not saved.
    normed_bytes = 0 if settings.lora_rank else size
    return (
        tokens / sequence_parts * shape.hidden_size * (FLOAT32 + normed_bytes) + gathered_bytes + tokens * _LOSS_BYTES
    )


def _draft_layer_bytes(shape: ModelShape, parallel: ParallelConfig, settings: PassSettings) -> float:
    """Return the bytes of a trained draft layer: two norms and their projection, the layer, the head.

    With recomputed layers, the draft layer is recomputed while its head's tensors exist.
    """
    size, tokens = settings.itemsize, _count_rank_tokens(parallel, settings) / _count_sequence_parts(parallel, settings)
    draft_layer_bytes = layer_bytes(shape, parallel, settings, shape.draft_layer_kind)
    # Both norms' outputs are copied into one tensor, the input of the projection.
    norm_bytes = 2 * _norm_bytes(parallel, settings, shape.hidden_size, is_fused=False)
    if settings.spec == "local":
        # The embeddings have no gradient here, so their norm saves no input.
        norm_bytes -= tokens * (shape.hidden_size + 1) * FLOAT32
        if size == FLOAT32:
            # This norm reads the hidden states in place. The model's head has already saved them.
            norm_bytes -= tokens * shape.hidden_size * size
    if settings.recomputes_layers:
        return _layer_input_bytes(shape, parallel, settings) + max(
            norm_bytes + draft_layer_bytes, _head_bytes(shape, parallel, settings)
        )
    return norm_bytes + draft_layer_bytes + _head_bytes(shape, parallel, settings)
