"""Predicted seconds of each phase of a step, in any layout of trainer and engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megarl.config import Recipe
from megarl.families.shape import ModelShape
from megarl.planner.layouts.candidates import EngineSizes, Placement
from megarl.planner.memory.engine_bytes import cache_block_bytes
from megarl.planner.memory.models import Models
from megarl.planner.memory.rank_memory import ITEM_BYTES
from megarl.planner.savings import Recomputation
from megarl.planner.seconds.constants import FITTED
from megarl.planner.seconds.gpus import GpuSpeeds
from megarl.planner.seconds.lengths import Lengths
from megarl.planner.seconds.rollout import EngineLayout, RolloutCost, RolloutSeconds
from megarl.planner.seconds.step import Workload, reshard_seconds
from megarl.planner.seconds.trainer import CauseSeconds, Layouts, Recomputed, TrainerCost
from megarl.planner.seconds.work import model_work

_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class LayoutCosts:
    """Predicts the seconds of a recipe's phases in any layout. `lengths`: lengths of completions."""

    recipe: Recipe
    models: Models
    speeds: GpuSpeeds
    """Speeds of the trainer's GPUs."""
    engine_speeds: GpuSpeeds
    """Speeds of the engines' GPUs. With shared GPUs they are equal."""
    lengths: Lengths
    staleness: int
    """Steps that separate engines may sample ahead."""

    @property
    def shape(self) -> ModelShape:
        return self.models.policy.shape

    @cached_property
    def workload(self) -> Workload:
        train, algorithm = self.recipe.train, self.recipe.algorithm
        updates = train.updates_per_step
        # The first update computes its own old log-probs. A reference model scores all samples.
        scoring_passes = (1 - 1 / updates) * (algorithm.old_logprobs == "trainer") + self.recipe.has_reference
        return Workload(
            lengths=self.lengths,
            num_prompts=train.prompts_per_step,
            samples_per_prompt=train.samples_per_prompt,
            updates=updates,
            scoring_passes=scoring_passes,
            staleness=self.staleness,
        )

    @property
    def _item_bytes(self) -> int:
        return ITEM_BYTES[self.recipe.model.dtype]

    @property
    def engine_item_bytes(self) -> int:
        return self._item_bytes if self.recipe.rollout.quantization == "none" else 1

    @property
    def _cache_item_bytes(self) -> int:
        return self._item_bytes if self.recipe.rollout.kv_cache_dtype == "auto" else 1

    @cached_property
    def _state_bytes(self) -> dict[str, int]:
        """The bytes per trained parameter, by state: weight, float32 gradient, main weight and moments."""
        item_bytes = self._item_bytes
        # Muon has a second moment for embedding and head only, so count one: a lower bound.
        num_moments = {"adam": 2, "muon": 1, "sgd": 0}[self.recipe.optimizer.name]
        # Main weights exist only if the weights are narrower than float32.
        num_float32_copies = (item_bytes < _FLOAT32) + num_moments
        return {"weights": item_bytes, "gradients": _FLOAT32, "optimizer": _FLOAT32 * num_float32_copies}

    @cached_property
    def trainer_cost(self) -> TrainerCost:
        return self.cost_of(self.shape)

    def cost_of(self, shape: ModelShape) -> TrainerCost:
        work = model_work(shape)
        return TrainerCost(
            work=work,
            gpu=self.speeds,
            constants=FITTED.for_gpu(self.speeds),
            score_flops=work.score_flops(self.lengths.sequences),
            item_bytes=self._item_bytes,
            host_share=self.recipe.trainer.optimizer_offload_fraction,
        )

    def update_seconds(
        self,
        layouts: Layouts,
        recomputations: Sequence[Recomputation],
        *,
        row_tokens: NDArray[np.float64],
        keeps_logits: bool,
    ) -> CauseSeconds:
        """Return the seconds of all updates of a step by cause (compute, communication, ...), each [layouts].

        `recomputations` has one item per layout. `row_tokens` [layouts]: most tokens of a packed row.
        """
        recomputed_shares = Recomputed(
            attention=np.array([recomputation.attention_share for recomputation in recomputations]),
            feed_forward=np.array([recomputation.feed_forward_share for recomputation in recomputations]),
        )
        return self.trainer_cost.update_seconds(
            layouts,
            recomputed_shares,
            tokens=self.workload.tokens,
            updates=self.workload.updates,
            row_tokens=row_tokens,
            keeps_logits=keeps_logits,
        )

    def scoring_seconds(self, layouts: Layouts, *, row_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds of a step's forward passes for log-probs and for the reward model's scores: [layouts].

        They compute no gradients. `row_tokens` [layouts]: capacity of a row in these passes.
        """
        tokens = self.workload.tokens
        scoring = self.trainer_cost.scoring_seconds(layouts, tokens=tokens, row_tokens=row_tokens)
        seconds = scoring.seconds * self.workload.scoring_passes
        if (reward_model := self.models.frozen.get("reward_model")) is not None:
            # The reward model scores each sample once.
            reward_pass = self.cost_of(reward_model.shape).scoring_seconds(
                layouts, tokens=tokens, row_tokens=row_tokens
            )
            seconds = seconds + reward_pass.seconds
        return seconds

    @cached_property
    def rollout_cost(self) -> RolloutCost:
        return RolloutCost(
            work=model_work(self.shape),
            gpu=self.engine_speeds,
            constants=FITTED.for_gpu(self.engine_speeds),
            item_bytes=self.engine_item_bytes,
            activation_bytes=self._item_bytes,
            cache_item_bytes=self._cache_item_bytes,
        )

    def rank_state_bytes(self, layouts: Layouts) -> dict[str, NDArray[np.float64]]:
        """Return a lower bound of a rank's bytes by state (weights, gradients, optimizer), each [layouts].

        Embedding and head count as if spread evenly over the pipeline stages.
        """
        rank_weights = self.trainer_cost.weights_on_rank(layouts)
        expert_weights, dense_weights = rank_weights.experts, rank_weights.dense
        weights = expert_weights + dense_weights
        # Data-parallel ranks share the optimizer's states. Experts have data-parallel groups of their own.
        optimizer_share = expert_weights / (layouts.world / (layouts.etp * layouts.ep * layouts.pp)) + dense_weights / (
            layouts.dp * layouts.cp
        )
        elements = {"weights": weights, "gradients": weights, "optimizer": optimizer_share}
        return {state: self._state_bytes[state] * num_elements for state, num_elements in elements.items()}

    def offload_seconds(
        self, state_bytes: Mapping[str, NDArray[np.float64]], states: Sequence[str]
    ) -> NDArray[np.float64]:
        """Return the seconds to move states to host memory and back [layouts]. Gradients are dropped instead."""
        moved_bytes = np.zeros_like(state_bytes["weights"])
        for state, bytes_key in (("optimizer", "optimizer"), ("parameters", "weights")):
            if state in states:
                moved_bytes = moved_bytes + state_bytes[bytes_key]
        return 2 * moved_bytes / self.speeds.pcie

    def model_loading_seconds(self, layouts: Layouts) -> NDArray[np.float64]:
        """Return the seconds to copy each scoring model once from host memory [layouts]."""
        frozen = [
            self.cost_of(planned_model.shape).weights_on_rank(layouts) for planned_model in self.models.frozen.values()
        ]
        loaded_weights = sum((weights.experts + weights.dense for weights in frozen), np.zeros(len(layouts.tp)))
        return self._state_bytes["weights"] * loaded_weights / self.speeds.pcie

    def reshard_seconds(self, placement: Placement, engine: EngineSizes) -> float:
        """Return a lower bound of the seconds of a reshard to these engines."""
        return reshard_seconds(
            model_work(self.shape),
            engine.tp,
            self.engine_speeds,
            is_separate=placement.ranks > 0,
            item_bytes=self._item_bytes,
        )

    @property
    def other_seconds(self) -> float:
        """Seconds outside all phases, equal for all layouts."""
        return FITTED.for_gpu(self.speeds).sample_seconds * self.workload.num_samples

    def rollout_seconds(self, placement: Placement, engine: EngineSizes, cache_tokens: float) -> RolloutSeconds:
        """Return the seconds of a rollout if each engine has a KV cache of `cache_tokens`."""
        ranks = placement.ranks or self.recipe.cluster.world_size
        engines = EngineLayout(
            tp=engine.tp,
            num_engines=ranks // engine.tp,
            max_requests=self.recipe.rollout.max_concurrent_requests,
            cache_tokens=cache_tokens,
        )
        workload, cost = self.workload, self.rollout_cost
        num_sampled = workload.num_samples * self.recipe.algorithm.oversampling
        if placement.ranks and placement.staleness:
            # Engines that sample ahead start only as many groups as are trained: algorithm.oversampling has no effect.
            num_sampled = workload.num_samples
            return cost.steady_seconds(
                engines,
                workload.lengths,
                num_samples=num_sampled,
                samples_per_prompt=workload.samples_per_prompt,
                staleness=placement.staleness,
            )
        return cost.rollout_seconds(
            engines, workload.lengths, num_samples=num_sampled, samples_per_prompt=workload.samples_per_prompt
        )

    def token_bytes(self, engine: EngineSizes) -> int:
        shape = self.shape.with_draft_layers(self.recipe.rollout.drafts_with_model_layers)
        itemsize, draft_layers = self._cache_item_bytes, bool(self.recipe.drafter)
        return cache_block_bytes(shape, engine.tp, block_tokens=1, itemsize=itemsize, draft_layers=draft_layers)
