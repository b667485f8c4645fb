"""Searches the layouts of a recipe that fit its GPUs, and ranks them by the predicted seconds of a step.

Each layout first gets a lower bound: its seconds with a KV cache for all requests. Layouts are examined by ascending
bound. A memory prediction decides whether a layout fits, and gives its real cache and seconds. The search ends when
every remaining bound is above the slowest result.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.families.shape import ModelShape
from megarl.planner import sizes
from megarl.planner.cache import cache_within
from megarl.planner.defaults import KEEP_LOGITS, can_keep_logits
from megarl.planner.gpus_of_run import NAME_THE_GPU, gpu_kind, gpu_memory
from megarl.planner.judge import MemoryJudge
from megarl.planner.layouts.candidates import Candidates, EngineSizes, Placement, TrainerSizes, reason_of
from megarl.planner.layouts.combinations import Combinations, LayoutChoice, TrainerOption, iterate_by_bound
from megarl.planner.layouts.costs import LayoutCosts
from megarl.planner.layouts.overrides import overrides_between, placement_values
from megarl.planner.layouts.results import FoundLayout, SearchResult
from megarl.planner.memory import activations
from megarl.planner.memory.devices import CONTEXT_BYTES, GPU, MARGIN_GIB, GpuMemory
from megarl.planner.memory.models import Models, PlannedModel
from megarl.planner.memory.rank_memory import RankMemory
from megarl.planner.predictions import models_of
from megarl.planner.savings import offloads, recomputations
from megarl.planner.search import search, with_field_values
from megarl.planner.seconds.gpus import GPUS
from megarl.planner.seconds.lengths import Lengths
from megarl.planner.seconds.rollout import RolloutSeconds
from megarl.planner.seconds.step import StepSeconds
from megarl.planner.seconds.trainer import CauseSeconds, Layouts
from megarl.planner.seconds.work import model_work
from megarl.types import ConfigError

_GIB = 2**30
MOST_CHECKED = 400
"""Maximum number of layouts whose memory is predicted in one search, to limit its time."""


@dataclass(frozen=True, kw_only=True)
class LayoutSearch:
    costs: LayoutCosts
    gpus: GpuMemory
    refusal: Callable[[Sequence[str]], str | None] | None = None
    """Returns the error of a start with a layout's overrides; None: no error."""

    @property
    def recipe(self) -> Recipe:
        return self.costs.recipe

    @property
    def models(self) -> Models:
        return self.costs.models

    @property
    def shape(self) -> ModelShape:
        return self.costs.shape

    def search(self, max_layouts: int = 10) -> SearchResult:
        """Return at most `max_layouts` layouts, fastest first, one for each pair of trainer and engine sizes."""
        start_time = time.monotonic()
        refusal_counts: Counter[str] = Counter()
        candidates = Candidates(self.recipe, self.shape, refusal_counts)
        groups = [
            group
            for placement in candidates.list_placements(self.costs.staleness)
            if (group := self._make_combinations(candidates, placement))
        ]
        ranking = search(
            self.recipe,
            iterate_by_bound(groups),
            lambda recipe, choice: self._plan_layout(recipe, choice, refusal_counts),
            lambda change: change.outcome.seconds.step,
            count=max_layouts,
            bound=lambda choice: choice.bound,
            skips=lambda choice, _: self._is_update_overfull(choice.group, choice.option_number),
            max_judged=MOST_CHECKED,
        )
        return SearchResult(
            layouts=tuple(change.outcome for change in ranking.changes),
            num_candidates=sum(group.least_seconds.size for group in groups),
            num_planned=ranking.num_judged,
            refused=dict(refusal_counts.most_common()),
            search_seconds=time.monotonic() - start_time,
            is_complete=ranking.is_complete,
            lengths=self.costs.lengths.source,
        )

    def _make_combinations(self, candidates: Candidates, placement: Placement) -> Combinations | None:
        """Return the combinations of trainer options, engines and offloads for a placement. None: there are none."""
        values_of_placement = placement_values(self.recipe, placement)
        placed = with_field_values(self.recipe, values_of_placement)
        engines = candidates.list_engines(placed)
        trainers = candidates.list_trainers(placed)
        if not engines or not trainers:
            return None
        trainer_options = self._list_fitting_options(candidates, placed, trainers)
        if not trainer_options:
            return None
        layouts = Layouts.of(*(option.trainer.by_axis for option in trainer_options))
        state_bytes = self.costs.rank_state_bytes(layouts)
        offload_choices = offloads(placed)
        # Predict the seconds of each phase: per trainer option, per option and offloaded states, or per engine.
        row_tokens = np.array([float(option.row_tokens) for option in trainer_options])
        recomputation_choices = [option.recomputation for option in trainer_options]
        update_seconds, update_seconds_without_logits = (
            self.costs.update_seconds(layouts, recomputation_choices, row_tokens=row_tokens, keeps_logits=keeps_logits)
            for keeps_logits in (True, False)
        )
        scoring_seconds = self.costs.scoring_seconds(layouts, row_tokens=row_tokens)
        loading_seconds = self.costs.model_loading_seconds(layouts)
        offload_seconds = np.stack(
            [loading_seconds + self.costs.offload_seconds(state_bytes, states) for states in offload_choices], axis=1
        )
        reshard_seconds = np.array([self.costs.reshard_seconds(placement, engine) for engine in engines])
        least_seconds = self._least_step_seconds(
            placement,
            engines,
            trainer_seconds=update_seconds.seconds + scoring_seconds,
            reshard_seconds=reshard_seconds,
            offload_seconds=offload_seconds,
        )
        # Colocated engines need GPU memory in addition to the trainer's states, so some combinations cannot fit.
        if not placement.ranks:
            is_overfull = self._is_reshard_overfull(state_bytes, engines, offload_choices)
            least_seconds = np.where(is_overfull, math.inf, least_seconds)
        return Combinations(
            placement=placement,
            placement_values=values_of_placement,
            placed=placed,
            trainer_options=trainer_options,
            engines=engines,
            offloads=offload_choices,
            update_seconds=update_seconds,
            update_seconds_without_logits=update_seconds_without_logits,
            scoring_seconds=scoring_seconds,
            offload_seconds=offload_seconds,
            reshard_seconds=reshard_seconds,
            least_seconds=least_seconds,
            least_state_bytes=self._least_state_bytes(state_bytes),
            least_cache_gib=[self._least_cache_gib(engine) for engine in engines],
            pass_settings=RankMemory(placed, self.models, GPU, 0).pass_settings(self.models.policy),
            refused=candidates.refused,
        )

    def _list_fitting_options(
        self, candidates: Candidates, placed: Recipe, trainers: Sequence[TrainerSizes]
    ) -> list[TrainerOption]:
        """Return the trainer options whose weights, gradients and optimizer fit into a GPU."""
        recompute_choices = recomputations(self.recipe, self.shape)
        options = [
            TrainerOption(trainer, recomputation, row_tokens)
            for trainer in trainers
            for row_tokens in dict.fromkeys(candidates.list_row_lengths(placed, trainer))
            for recomputation in recompute_choices
        ]
        layouts = Layouts.of(*(option.trainer.by_axis for option in options))
        least_state_bytes = self._least_state_bytes(self.costs.rank_state_bytes(layouts))
        is_fitting = least_state_bytes + CONTEXT_BYTES <= self.gpus.trainer * _GIB
        num_refused = int((~is_fitting).sum())
        candidates.refused["memory: weights, gradients and optimizer of a rank exceed its GPU"] += num_refused
        return [option for option, is_option_fitting in zip(options, is_fitting, strict=True) if is_option_fitting]

    def _least_step_seconds(
        self,
        placement: Placement,
        engines: Sequence[EngineSizes],
        *,
        trainer_seconds: NDArray[np.float64],
        reshard_seconds: NDArray[np.float64],
        offload_seconds: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Return a lower bound of a step's seconds [trainer options, engines, offloads]: no cache limits a rollout."""
        rollout_seconds = np.array(
            [self.costs.rollout_seconds(placement, engine, math.inf).seconds for engine in engines]
        )
        seconds_of_options = trainer_seconds[:, None]
        # Engines that sample ahead overlap with the trainer.
        phase_seconds = (
            np.maximum(seconds_of_options, rollout_seconds)
            if placement.staleness
            else seconds_of_options + rollout_seconds
        )
        return (phase_seconds + reshard_seconds)[:, :, None] + offload_seconds[:, None, :] + self.costs.other_seconds

    def _least_state_bytes(self, state_bytes: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
        """Return a lower bound of a rank's states on its GPU during an update [layouts]."""
        optimizer_share_on_gpu = (
            1 - self.recipe.trainer.optimizer_offload_fraction
        ) * self.recipe.trainer.distributed_optimizer
        return state_bytes["weights"] + state_bytes["gradients"] + optimizer_share_on_gpu * state_bytes["optimizer"]

    def _is_update_overfull(self, group: Combinations, option_number: int) -> bool:
        if option_number not in group.overfull and option_number not in group.examined:
            self._mark_overfull_updates(group, option_number)
        return option_number in group.overfull

    def _mark_overfull_updates(self, group: Combinations, option_number: int) -> None:
        """Mark a trainer option if its states and saved activations exceed the GPU of the first pipeline stage.

        Options that need at least as much memory are marked too. This lower bound is cheaper than a full prediction.
        """
        group.examined.add(option_number)
        option = group.trainer_options[option_number]
        parallel = replace(group.parallel, **option.trainer.by_axis)
        settings = replace(
            group.pass_settings,
            row_tokens=option.row_tokens,
            sequence_parallel=parallel.tp > 1 and self.recipe.trainer.sequence_parallel is not False,
            recomputes_layers=option.recomputation.recompute == "full",
            recomputed=frozenset(option.recomputation.modules if option.recomputation.recompute == "selective" else ()),
        )
        num_layers = self.shape.num_layers
        # The first stage has at least the mean number of layers, rounded down.
        share_of_layers = num_layers // parallel.pp * parallel.pp / num_layers
        saved_bytes = activations.stage_bytes(self.shape, parallel, 0, settings)
        if (
            share_of_layers * group.least_state_bytes[option_number] + saved_bytes + CONTEXT_BYTES
            <= (self.gpus.trainer - MARGIN_GIB) * _GIB
        ):
            return
        options_needing_as_much = group.options_needing_as_much(option)
        group.refused["memory: states and activations of an update exceed a GPU"] += len(
            options_needing_as_much - group.overfull
        )
        group.overfull |= options_needing_as_much

    def _is_reshard_overfull(
        self,
        state_bytes: Mapping[str, NDArray[np.float64]],
        engines: Sequence[EngineSizes],
        offloads: Sequence[Sequence[str]],
    ) -> NDArray[np.bool_]:
        """Return whether a colocated reshard exceeds a GPU, without a KV cache [layouts, engines, offloads].

        `state_bytes` has a rank's bytes by state, each [layouts].
        """
        states_on_gpu = ["gradients", *([] if self.recipe.trainer.optimizer_offload_fraction else ["optimizer"])]
        # A reshard reads the parameters on the GPU, even if they are offloaded at other times.
        state_bytes_of_offloads = [
            state_bytes["weights"] + sum(state_bytes[state] for state in states_on_gpu if state not in offloaded_states)
            for offloaded_states in offloads
        ]
        engine_bytes = self.costs.engine_item_bytes * model_work(self.shape).weights
        engine_bytes_of_rank = np.array([engine_bytes / engine.tp for engine in engines])
        total_bytes = (
            np.stack(state_bytes_of_offloads, axis=1)[:, None, :] + engine_bytes_of_rank[None, :, None] + CONTEXT_BYTES
        )
        return total_bytes > (self.gpus.trainer - MARGIN_GIB) * _GIB

    def _plan_layout(self, recipe: Recipe, choice: LayoutChoice, refused: Counter[str]) -> FoundLayout | None:
        """Return a layout with its predicted memory, KV cache and seconds; None: it does not fit.

        `recipe` already has the values of `choice`. `refused` counts the reasons against layouts.
        """
        group = choice.group
        least_gib = group.least_cache_gib[choice.engine_number]
        parallel = sizes.parallel_of(recipe)
        judge = MemoryJudge(self._models_on(parallel), self.gpus, _fullest_stages(parallel))
        table = judge.predict(recipe)
        # Leave the same margin for prediction errors in all phases as for the default KV cache.
        if overfull_phases := judge.overfull_phases(table, margin_gib=MARGIN_GIB):
            refused[f"memory: {overfull_phases[0].name} exceeds a GPU"] += 1
            if any(phase.metric in ("train", "logprobs") for phase in overfull_phases):
                group.overfull |= group.options_needing_as_much(choice.option)
            return None
        # Give the KV cache all memory that is left.
        cache_gib = max(least_gib, cache_within(table, self.gpus.engine - MARGIN_GIB))
        added_cache_bytes = (cache_gib - least_gib) * _GIB
        gib_by_phase = {
            phase.name: (phase.device_bytes + (added_cache_bytes if phase.use("KV cache").device_bytes else 0)) / _GIB
            for phase in table.phases
        }
        # Fields without effect under this placement get the placement's values.
        values = choice.layout_values | dict(group.placement_values) | {"rollout.kv_cache_gib": round(cache_gib, 1)}
        overrides = overrides_between(self.recipe, values)
        if self.refusal is not None and (refusal_text := self.refusal(overrides)) is not None:
            refused[reason_of(refusal_text)] += 1
            return None
        # A start decides about keep_logits in the same way.
        keeps_logits = can_keep_logits(with_field_values(recipe, {KEEP_LOGITS: True}), judge)
        update_seconds = group.update_seconds if keeps_logits else group.update_seconds_without_logits
        cache_tokens = cache_gib * _GIB / self.costs.token_bytes(choice.engine)
        rollout = self.costs.rollout_seconds(group.placement, choice.engine, cache_tokens)
        return FoundLayout(
            overrides=overrides,
            trainer=choice.option.trainer,
            engine=choice.engine,
            placement=group.placement,
            seconds=self._step_seconds(choice, update_seconds, rollout),
            rollout=rollout,
            update=update_seconds.at(choice.option_number),
            gib=gib_by_phase,
            kv_cache_gib=cache_gib,
        )

    def _step_seconds(self, choice: LayoutChoice, update_seconds: CauseSeconds, rollout: RolloutSeconds) -> StepSeconds:
        """Look up the seconds of each phase for this choice. `rollout` depends on the KV cache, so it is passed in."""
        group, option_number = choice.group, choice.option_number
        return StepSeconds(
            rollout=rollout.seconds,
            logprobs=float(group.scoring_seconds[option_number]),
            train=float(update_seconds.seconds[option_number]),
            reshard=float(group.reshard_seconds[choice.engine_number]),
            offload=float(group.offload_seconds[option_number, choice.offload_number]),
            other=self.costs.other_seconds,
            is_concurrent=group.placement.staleness > 0,
        )

    def _models_on(self, parallel: ParallelConfig) -> Models:
        """Return the run's models with these parallel sizes. Teachers keep their own sizes."""

        def with_parallel(planned_model: PlannedModel | None) -> PlannedModel | None:
            return None if planned_model is None else PlannedModel(planned_model.shape, parallel)

        policy = with_parallel(self.models.policy)
        assert policy is not None
        frozen = {
            name: planned_model if name in self.recipe.teachers else PlannedModel(planned_model.shape, parallel)
            for name, planned_model in self.models.frozen.items()
        }
        return Models(policy, with_parallel(self.models.critic), frozen)

    def _least_cache_gib(self, engine: EngineSizes) -> float:
        # vLLM reserves one block of 16 tokens, and one block is partly filled.
        needed_bytes = (self.recipe.context_tokens + 32) * self.costs.token_bytes(engine)
        return math.ceil(needed_bytes / _GIB * 100) / 100


def _fullest_stages(parallel: ParallelConfig) -> list[int]:
    """Return the pipeline stages that may need the most memory: the first, the second and the last.

    Later stages have fewer rows in flight than the second, and at most as many layers.
    """
    return sorted({0, min(1, parallel.pp - 1), parallel.pp - 1})


def make_layout_search(
    recipe: Recipe,
    lengths: Lengths,
    max_staleness: int | None = None,
    refusal: Callable[[Sequence[str]], str | None] | None = None,
) -> LayoutSearch:
    """Return the search over a recipe's layouts.

    `max_staleness`: steps that separate engines may sample ahead; None: as in the recipe. `refusal` returns the error
    of a start with a layout's overrides; None: overrides are not checked. Raises ConfigError if the cost model does not
    cover the recipe, or if the kind of GPU is unknown.
    """
    if recipe.loop != "rl":
        raise ConfigError(f"loop = {recipe.loop}: --search ranks layouts of the loop rl only; leave it out")
    if recipe.lora.rank:
        raise ConfigError(f"lora.rank = {recipe.lora.rank}: --search ranks training of all weights only; leave it out")
    if recipe.has_critic:
        raise ConfigError(
            f"algorithm.advantage = {recipe.algorithm.advantage}: --search ranks runs without a critic; leave it out"
        )
    if recipe.trainer.fp8 != "none":
        raise ConfigError(f"trainer.fp8 = {recipe.trainer.fp8}: --search ranks training in bfloat16 only; leave it out")
    kind, gpus = gpu_kind(recipe), gpu_memory(recipe)
    if kind is None or gpus is None:
        raise ConfigError(f"--search needs the kind of the run's GPUs; {NAME_THE_GPU.partition(' or GiB')[0]}")
    staleness = recipe.rollout.staleness_bound if max_staleness is None else max_staleness
    engines = recipe.cluster.groups.engines
    engine_kind = kind if engines is None or engines.gpu_memory_gib is None else engines.gpu_memory_gib
    if not isinstance(engine_kind, str):
        raise ConfigError(
            f"cluster.groups.engines.gpu_memory_gib = {engine_kind:g}: --search needs the kind of the engines' GPUs; "
            "set it to h100, h200 or b200"
        )
    costs = LayoutCosts(
        recipe=recipe,
        models=models_of(recipe, sizes.parallel_of(recipe)),
        speeds=GPUS[kind],
        engine_speeds=GPUS[engine_kind],
        lengths=lengths,
        staleness=staleness,
    )
    return LayoutSearch(costs=costs, gpus=gpus, refusal=refusal)
