"""Seconds of the trainer's passes over a batch, for many parallel layouts at once.

A batch is packed into rows (micro-batches). A row's pass takes the time of the slowest pipeline stage: matrix products,
collectives, and a fixed time per layer. At the start and the end of the pipeline some stages are idle (the bubble).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.planner.seconds.constants import Constants
from megarl.planner.seconds.gpus import GpuSpeeds
from megarl.planner.seconds.work import ModelWork

Numbers = NDArray[np.float64]

_ITEM_BYTES = 2
_GRADIENT_BYTES = 4
"""Bytes of a parameter's float32 gradient. Data-parallel ranks send it, and later the parameter's new value."""
_OPTIMIZER_BYTES = 30
"""Bytes that Adam reads and writes per parameter: gradient, main weight and moments twice, new value."""
_EXPOSED_REDUCTION = 0.5
"""Share of the gradient reduction that the backward pass does not hide."""
_FILL = 0.95
"""Filled share of a row's capacity. Packing with balanced FLOPs has 0.94 to 0.97 (measured)."""
_BALANCE = 1.03
"""Time of the slowest data-parallel rank divided by the mean."""
_BACKWARD_COLLECTIVES = 1.5
"""Tensor-parallel collectives per backward pass, if a forward pass has one: inputs are gathered again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Parallel sizes of many trainers, each int [layouts], named like the fields of `trainer`."""

    tp: NDArray[np.int64]
    pp: NDArray[np.int64]
    cp: NDArray[np.int64]
    vpp: NDArray[np.int64]
    ep: NDArray[np.int64]
    etp: NDArray[np.int64]
    dp: NDArray[np.int64]

    @property
    def world(self) -> NDArray[np.int64]:
        return self.tp * self.pp * self.cp * self.dp

    @classmethod
    def of(cls, *layouts: Mapping[str, int]) -> Layouts:
        """Return layouts from their sizes by axis. A missing size is 1."""
        rows = [dict.fromkeys((field.name for field in fields(cls)), 1) | dict(layout) for layout in layouts]
        return cls(**{axis: np.asarray([row[axis] for row in rows], np.int64) for axis in rows[0]})

    def select(self, is_selected: NDArray[np.bool_]) -> Layouts:
        return Layouts(**{field.name: getattr(self, field.name)[is_selected] for field in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """Shares of a forward pass that the backward pass computes again, each from 0 to 1 [layouts]."""

    attention: Numbers
    """Share of projections, scores and norms."""
    feed_forward: Numbers
    """Share of dense feed-forward layers, routers and experts, with their collectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseSeconds:
    """Predicted seconds by cause, each [layouts]."""

    compute: Any = 0.0
    """Matrix products and attention."""
    launches: Any = 0.0
    """Fixed times of layers: norms, kernel launches, routing."""
    tensor_exchange: Any = 0.0
    context_exchange: Any = 0.0
    expert_exchange: Any = 0.0
    bubble: Any = 0.0
    """Idle pipeline stages."""
    gradients: Any = 0.0
    """Reduction of gradients, and gathering of new parameters, over data-parallel ranks."""
    optimizer: Any = 0.0

    def __add__(self, addend: CauseSeconds) -> CauseSeconds:
        return CauseSeconds(**{cause: getattr(self, cause) + getattr(addend, cause) for cause in self._causes()})

    def __mul__(self, factor: Any) -> CauseSeconds:
        return CauseSeconds(**{cause: getattr(self, cause) * factor for cause in self._causes()})

    @property
    def seconds(self) -> Any:
        return sum(getattr(self, cause) for cause in self._causes())

    def at(self, layout_index: int) -> dict[str, float]:
        """Return the seconds of one layout by cause, without zeros."""
        seconds_by_cause = {}
        for cause in self._causes():
            seconds = getattr(self, cause)
            # A plain number is the same for all layouts.
            seconds_by_cause[cause] = float(seconds if np.ndim(seconds) == 0 else seconds[layout_index])
        return {cause: seconds for cause, seconds in seconds_by_cause.items() if seconds}

    @classmethod
    def _causes(cls) -> list[str]:
        return [field.name for field in fields(cls)]

    def multiply(self, factors: CauseSeconds) -> CauseSeconds:
        return CauseSeconds(**{cause: getattr(self, cause) * getattr(factors, cause) for cause in self._causes()})


class LayerSeconds(NamedTuple):
    """Seconds of a row's forward pass through a pipeline stage, for the two halves of each layer."""

    attention: CauseSeconds
    feed_forward: CauseSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """Numbers of weights on a rank, each [layouts]."""

    experts: Numbers
    dense: Numbers
    """All weights except experts."""


@dataclass(frozen=True, kw_only=True)
class TrainerCost:
    """Predicts passes and updates of a model on one kind of GPU."""

    work: ModelWork
    gpu: GpuSpeeds
    constants: Constants
    score_flops: float
    """FLOPs of attention scores for a token's forward pass, averaged over the tokens of the batch."""
    item_bytes: float = _ITEM_BYTES
    """Bytes of a weight or an activation: 2 in bfloat16, 4 in float32."""
    host_share: float = 0.0
    """Share of the parameters that Adam updates on the CPU, from 0 to 1."""

    def update_seconds(
        self,
        layouts: Layouts,
        recomputed: Recomputed,
        *,
        tokens: float,
        updates: int,
        row_tokens: Numbers,
        keeps_logits: bool = True,
    ) -> CauseSeconds:
        """Return the seconds of all updates of a step by cause, each [layouts].

        `tokens`: of the whole batch. `row_tokens` [layouts]: capacity of a row, over all context-parallel ranks.
        `keeps_logits`: logits stay for the backward pass (`trainer.keep_logits`). False: it computes them again.
        """
        num_rows, tokens_in_row = self._count_rows(
            layouts, tokens=tokens / updates, row_tokens=row_tokens, is_update=True
        )
        attention, feed_forward = self._forward_seconds(layouts, tokens_in_row)
        # Matrix products of the head: one forward, two backward, and one if logits are computed again. A layer has one
        # forward pass and a backward pass of twice the work.
        head_seconds = self._head_seconds(layouts, tokens_in_row, products=3 if keeps_logits else 4, layer_passes=3)
        # A backward pass has two matrix products for each one of the forward pass: for the inputs and for the weights.
        backward_factors = CauseSeconds(
            compute=2.0,
            launches=2.0,
            tensor_exchange=_BACKWARD_COLLECTIVES,
            context_exchange=2.0,
            expert_exchange=1.0,
        )
        seconds_per_row = attention.multiply(backward_factors) + feed_forward.multiply(backward_factors) + head_seconds
        seconds_per_row += attention * (1 + recomputed.attention) + feed_forward * (1 + recomputed.feed_forward)
        pass_seconds = seconds_per_row * num_rows
        bubble_seconds = CauseSeconds(bubble=seconds_per_row.seconds * (layouts.pp - 1) / layouts.vpp)
        seconds = (pass_seconds + bubble_seconds) * _BALANCE + self._optimizer_seconds(layouts)
        return seconds * updates

    def scoring_seconds(self, layouts: Layouts, *, tokens: float, row_tokens: Numbers) -> CauseSeconds:
        """Return the seconds of a forward pass over the batch, by cause (compute, bubbles, ...), each [layouts]."""
        num_rows, tokens_in_row = self._count_rows(layouts, tokens=tokens, row_tokens=row_tokens, is_update=False)
        attention, feed_forward = self._forward_seconds(layouts, tokens_in_row)
        head_seconds = self._head_seconds(layouts, tokens_in_row, products=1, layer_passes=1)
        seconds_per_row = attention + feed_forward + head_seconds
        bubble_seconds = CauseSeconds(bubble=seconds_per_row.seconds * (layouts.pp - 1))
        return (seconds_per_row * num_rows + bubble_seconds) * _BALANCE

    def _count_rows(
        self, layouts: Layouts, *, tokens: float, row_tokens: Numbers, is_update: bool
    ) -> tuple[Numbers, Numbers]:
        """Return a data-parallel rank's rows, and the tokens per row: both [layouts]."""
        rank_tokens = tokens / layouts.dp
        # Packing leaves rows a little short of full (_FILL).
        num_rows = np.maximum(1, np.ceil(rank_tokens / (_FILL * row_tokens)))
        if is_update:
            # The interleaved schedule of an update takes pp rows at a time.
            num_rows = np.where(layouts.vpp > 1, np.ceil(num_rows / layouts.pp) * layouts.pp, num_rows)
        return num_rows, rank_tokens / num_rows

    def _forward_seconds(self, layouts: Layouts, tokens: Numbers) -> LayerSeconds:
        """Return the seconds of a row's forward pass through a stage's layers: attention, and feed-forward."""
        work = self.work
        stage_layers = np.ceil(work.num_layers / layouts.pp)
        rank_tokens = tokens / layouts.cp
        share_of_model = stage_layers / work.num_layers
        flops_per_second = self._gemm_flops_per_second(rank_tokens) * layouts.tp
        projection_flops = self._projection_flops()
        tensor_exchange_seconds = self._tensor_exchange_seconds(
            layouts, rank_tokens=rank_tokens, stage_layers=stage_layers
        )
        attention = CauseSeconds(
            compute=rank_tokens * (projection_flops + self.score_flops) * share_of_model / flops_per_second,
            # `layer_seconds` is of whole layers, so it counts only here.
            launches=self.constants.layer_seconds * stage_layers,
            tensor_exchange=tensor_exchange_seconds,
            context_exchange=self._context_exchange_seconds(layouts, tokens=tokens, stage_layers=stage_layers),
        )
        feed_forward = CauseSeconds(
            compute=rank_tokens * (work.layer_flops - projection_flops) * share_of_model / flops_per_second,
            # Experts take the tokens of each tensor-parallel rank, so nothing is gathered for them.
            tensor_exchange=tensor_exchange_seconds * (1 - work.num_expert_layers / work.num_layers),
        )
        if work.num_expert_layers:
            feed_forward += self._expert_seconds(layouts, rank_tokens=rank_tokens, stage_layers=stage_layers)
        return LayerSeconds(attention, feed_forward)

    def _projection_flops(self) -> float:
        work = self.work
        projection_flops = 2.0 * work.shape.attention.projection_elements(work.shape.hidden_size) * work.num_layers
        # Layers with linear attention count like the others. The limit leaves no negative FLOPs to the feed-forward.
        return min(projection_flops, work.layer_flops)

    def _tensor_exchange_seconds(self, layouts: Layouts, *, rank_tokens: Numbers, stage_layers: Numbers) -> Numbers:
        """Return the seconds of tensor-parallel exchange around one half (attention, say) of a stage's layers."""
        hidden_bytes = rank_tokens * self.work.shape.hidden_size * self.item_bytes
        link_bytes_per_second = self._link_bytes_per_second(layouts.tp)
        # A gather before this half of a layer, and a reduction after it.
        return 2 * hidden_bytes * (layouts.tp - 1) / layouts.tp / link_bytes_per_second * stage_layers

    def _context_exchange_seconds(self, layouts: Layouts, *, tokens: Numbers, stage_layers: Numbers) -> Numbers:
        """Return the seconds to exchange a row's keys and values over context-parallel ranks [layouts]."""
        key_value_bytes = self.work.shape.attention.cached_numbers(1) * self.item_bytes
        received_tokens = tokens / layouts.cp * (layouts.cp - 1)
        bytes_per_second = self._link_bytes_per_second(layouts.tp * layouts.cp)
        attention_layers = stage_layers * self.work.num_attention_layers / self.work.num_layers
        return received_tokens * key_value_bytes / layouts.tp / bytes_per_second * attention_layers

    def _expert_seconds(self, layouts: Layouts, *, rank_tokens: Numbers, stage_layers: Numbers) -> CauseSeconds:
        """Return the seconds of a row's forward pass through a stage's experts, with their all-to-all."""
        work, constants = self.work, self.constants
        share_of_model = stage_layers / work.num_layers
        expert_layers = stage_layers * work.num_expert_layers / work.num_layers
        routed_tokens = rank_tokens / layouts.tp
        expert_ranks = layouts.ep * layouts.etp
        tokens_per_expert = routed_tokens * expert_ranks * work.shape.top_k / work.shape.num_experts
        # Matrix products over few tokens are slower.
        slowed_tokens = tokens_per_expert + constants.expert_half_tokens
        flops_per_second = constants.gemm_efficiency * self.gpu.flops * tokens_per_expert / slowed_tokens
        # Tokens are sent to their experts and back.
        sent_bytes = 2 * routed_tokens * work.shape.top_k * work.shape.hidden_size * self.item_bytes * expert_layers
        return CauseSeconds(
            compute=routed_tokens * work.expert_flops * share_of_model / flops_per_second,
            launches=constants.expert_layer_seconds * expert_layers,
            expert_exchange=sent_bytes * self._exchange_seconds(expert_ranks),
        )

    def _exchange_seconds(self, group_sizes: NDArray[np.int64]) -> Numbers:
        """Return the seconds per byte that a rank sends in an all-to-all over groups of these sizes.

        NVLink and network work at once.
        """
        ranks_on_node = np.minimum(group_sizes, self.gpu.nvlink_gpus)
        share_on_node, share_between_nodes = (
            (ranks_on_node - 1) / group_sizes,
            (group_sizes - ranks_on_node) / group_sizes,
        )
        seconds = np.maximum(share_on_node / self.gpu.nvlink, share_between_nodes / self.gpu.network)
        return seconds / self.constants.link_efficiency

    def _head_seconds(self, layouts: Layouts, tokens: Numbers, *, products: int, layer_passes: int) -> CauseSeconds:
        """Return the seconds by which the output layer, with `products` matrix products, delays the slowest stage.

        If layers do not divide evenly, the last stage has one layer less. This saves `layer_passes` passes of a layer.
        """
        work = self.work
        rank_tokens = tokens / layouts.cp
        flops_per_second = self._gemm_flops_per_second(rank_tokens) * layouts.tp
        layer_flops = (work.layer_flops + self.score_flops) / work.num_layers
        missing_layers = np.ceil(work.num_layers / layouts.pp) - np.floor(work.num_layers / layouts.pp)
        added_flops = products * work.head_flops - layer_passes * (missing_layers * layer_flops)
        return CauseSeconds(compute=rank_tokens * np.maximum(0.0, added_flops) / flops_per_second)

    def _gemm_flops_per_second(self, tokens: Numbers) -> Numbers:
        return self.constants.gemm_efficiency * self.gpu.flops * tokens / (tokens + self.constants.half_tokens)

    def _link_bytes_per_second(self, group: NDArray[np.int64]) -> Numbers:
        speed = np.where(group <= self.gpu.nvlink_gpus, self.gpu.nvlink, self.gpu.network)
        return self.constants.link_efficiency * speed

    def weights_on_rank(self, layouts: Layouts) -> RankWeights:
        """Return the weights on a rank, experts and all others, both [layouts]."""
        work = self.work
        experts = work.expert_weights / (layouts.etp * layouts.ep * layouts.pp)
        # The fullest stage has the embedding or the head.
        dense = work.layer_weights / (layouts.tp * layouts.pp) + work.embedding_weights / (
            layouts.tp * np.minimum(layouts.pp, 2)
        )
        return RankWeights(experts=experts, dense=dense)

    def _optimizer_seconds(self, layouts: Layouts) -> CauseSeconds:
        """Return the seconds of an update's gradient reduction and optimizer step, each [layouts]."""
        weights = self.weights_on_rank(layouts)
        experts, dense = weights.experts, weights.dense
        num_expert_shards = layouts.world / (layouts.etp * layouts.ep * layouts.pp)
        num_shards = layouts.dp * layouts.cp
        bytes_per_second = np.where(layouts.tp * num_shards <= self.gpu.nvlink_gpus, self.gpu.nvlink, self.gpu.network)
        sent_weights = experts * (num_expert_shards - 1) / num_expert_shards + dense * (num_shards - 1) / num_shards
        shard_weights = experts / num_expert_shards + dense / num_shards
        gpu_seconds_per_weight = _OPTIMIZER_BYTES / self.gpu.memory
        # The gradient goes to the host, and the new value comes back.
        host_seconds_per_weight = (
            _OPTIMIZER_BYTES / self.gpu.host_memory + (_GRADIENT_BYTES + self.item_bytes) / self.gpu.pcie
        )
        sent_bytes = (_GRADIENT_BYTES + self.item_bytes) * sent_weights
        return CauseSeconds(
            gradients=_EXPOSED_REDUCTION * sent_bytes / (self.constants.link_efficiency * bytes_per_second),
            optimizer=((1 - self.host_share) * gpu_seconds_per_weight + self.host_share * host_seconds_per_weight)
            * shard_weights,
        )
