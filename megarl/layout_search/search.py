"""The fastest layouts of a recipe on its GPUs, by predicted seconds of a step, under the predicted memory.

Seconds of all layouts are computed at once, with a KV cache that holds all requests. That is a lower bound. Layouts are
then taken in the order of their bounds: the memory plan says whether each fits and how large its cache is, and its
seconds are computed again. The search ends when no bound is below the worst layout found.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.families.shape import ModelShape
from megarl.layout_search.candidates import (
    Candidates,
    EngineSizes,
    Placement,
    reason_of,
    vllm_with,
)
from megarl.layout_search.combinations import Combinations, Row, in_order
from megarl.layout_search.costs import LayoutCosts
from megarl.layout_search.overrides import RecipeFile, overrides_between, placement_values
from megarl.layout_search.results import FoundLayout, SearchResult
from megarl.memory_plan import activations
from megarl.memory_plan.devices import CONTEXT_BYTES, GPU, MARGIN_GIB, GpuMemory
from megarl.memory_plan.kept_logits import can_keep_logits
from megarl.memory_plan.models import Built, Models
from megarl.memory_plan.phases import memory_table
from megarl.memory_plan.rank_memory import RankMemory
from megarl.memory_plan.remedies import cache_within, with_field_values
from megarl.memory_plan.savings import offloads, recomputations
from megarl.preflight import sizes
from megarl.preflight.memory.memory_fit import NAME_THE_GPU, gpu_kind, gpu_memory, models_of
from megarl.step_cost.gpus import GPUS
from megarl.step_cost.lengths import Lengths
from megarl.step_cost.step import StepSeconds
from megarl.step_cost.trainer import Layouts, Recomputed
from megarl.step_cost.work import model_work
from megarl.types import ConfigError

_GIB = 2**30
MOST_CHECKED = 400
"""Greatest number of layouts whose memory is planned: the limit of the search's time."""


@dataclass(frozen=True, kw_only=True)
class LayoutSearch:
    """Searches the layouts of a recipe."""

    costs: LayoutCosts
    gpus: GpuMemory
    file: RecipeFile | None = None
    """File of the recipe. Layouts are refused if a start of the file with their overrides would be."""

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
        """Return the fastest layouts, at most `max_layouts`. Each pair of trainer's and engines' sizes appears once."""
        started = time.monotonic()
        refused: Counter[str] = Counter()
        candidates = Candidates(self.recipe, self.shape, refused)
        groups = [
            group
            for placement in candidates.placements(self.costs.staleness)
            if (group := self._group(candidates, placement))
        ]
        fastest: dict[tuple[Any, ...], FoundLayout] = {}
        num_planned, is_complete = 0, True
        for group, index in in_order(groups):
            bound = float(group.bound[index])
            worst = sorted(layout.seconds.step for layout in fastest.values())[max_layouts - 1 : max_layouts]
            if worst and bound >= worst[0]:
                break
            row, engine, _ = index
            if not math.isfinite(bound):
                # The remaining combinations cannot fit either.
                break
            if row in group.overfull or (row not in group.examined and self._is_overfull_in_update(group, row)):
                continue
            key = (group.rows[row].trainer, group.engines[engine], group.placement)
            if key in fastest and fastest[key].seconds.step <= bound:
                continue
            if num_planned == MOST_CHECKED:
                is_complete = False
                break
            num_planned += 1
            layout = self._plan_layout(group, index, refused)
            if layout is not None and (key not in fastest or layout.seconds.step < fastest[key].seconds.step):
                fastest[key] = layout
        ranked = sorted(fastest.values(), key=lambda layout: layout.seconds.step)[:max_layouts]
        return SearchResult(
            layouts=tuple(ranked),
            num_candidates=sum(group.bound.size for group in groups),
            num_planned=num_planned,
            refused=dict(refused.most_common()),
            search_seconds=time.monotonic() - started,
            is_complete=is_complete,
            lengths=self.costs.lengths.source,
        )

    def _group(self, candidates: Candidates, placement: Placement) -> Combinations | None:
        """Return the combinations of a placement, or None if it allows none."""
        placed = with_field_values(self.recipe, placement_values(self.recipe, placement))
        engines = candidates.engines(placed)
        trainers = candidates.trainers(placed)
        if not engines or not trainers:
            return None
        choices = recomputations(self.recipe, self.shape)
        rows = [
            Row(trainer, recomputation, row_tokens)
            for trainer in trainers
            for row_tokens in dict.fromkeys(candidates.row_lengths(placed, trainer))
            for recomputation in choices
        ]
        layouts = Layouts.of(*(row.trainer.by_axis for row in rows))
        state_bytes = self.costs.rank_state_bytes(layouts)
        states = self._least_states(state_bytes)
        # The trainer's states alone.
        fits = states + CONTEXT_BYTES <= self.gpus.trainer * _GIB
        candidates.refused["memory: weights, gradients and optimizer of a rank exceed its GPU"] += int((~fits).sum())
        if not fits.any():
            return None
        rows = [row for row, fit in zip(rows, fits, strict=True) if fit]
        layouts, states = layouts.select(fits), states[fits]
        state_bytes = {state: num_bytes[fits] for state, num_bytes in state_bytes.items()}
        recomputed = Recomputed(
            attention=np.array([row.recomputation.attention_share for row in rows]),
            feed_forward=np.array([row.recomputation.feed_forward_share for row in rows]),
        )
        row_tokens = np.array([float(row.row_tokens) for row in rows])
        load, cost = self.costs.load, self.costs.trainer_cost
        update, without_logits = (
            cost.update(
                layouts,
                recomputed,
                tokens=load.tokens,
                updates=load.updates,
                row_tokens=row_tokens,
                keeps_logits=keeps_logits,
            )
            for keeps_logits in (True, False)
        )
        scoring = cost.scoring(layouts, tokens=load.tokens, row_tokens=row_tokens)
        logprobs = scoring.seconds * load.scoring_passes
        if (reward_model := self.models.frozen.get("reward_model")) is not None:
            # It scores every sample once.
            scored = self.costs.cost_of(reward_model.shape).scoring(layouts, tokens=load.tokens, row_tokens=row_tokens)
            logprobs = logprobs + scored.seconds
        offloaded = offloads(placed)
        waiting = self.costs.waiting_seconds(layouts)
        offload = np.stack([waiting + self.costs.offload_seconds(state_bytes, states) for states in offloaded], axis=1)
        rollout = np.array([self.costs.rollout(placement, engine, math.inf).seconds for engine in engines])
        reshard = np.array([self.costs.reshard_seconds(placement, engine) for engine in engines])
        trained = (update.seconds + logprobs)[:, None]
        both = np.maximum(trained, rollout) if placement.staleness else trained + rollout
        bound = (both + reshard)[:, :, None] + offload[:, None, :] + self.costs.other_seconds
        if not placement.ranks:
            bound = np.where(self._is_overfull(state_bytes, engines, offloaded), math.inf, bound)
        settings = RankMemory(placed, self.models, GPU, 0).pass_settings(self.models.policy)
        return Combinations(
            placement=placement,
            placed=placed,
            rows=rows,
            engines=engines,
            offloads=offloaded,
            update=update,
            update_without_logits=without_logits,
            logprobs=logprobs,
            offload=offload,
            reshard=reshard,
            bound=bound,
            states=states,
            settings=settings,
            refused=candidates.refused,
        )

    def _least_states(self, state_bytes: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
        """Return the bytes of a rank's states on its GPU during an update, a lower bound [layouts]."""
        on_gpu = (1 - self.recipe.trainer.optimizer_offload_fraction) * self.recipe.trainer.distributed_optimizer
        return state_bytes["weights"] + state_bytes["gradients"] + on_gpu * state_bytes["optimizer"]

    def _is_overfull_in_update(self, group: Combinations, number: int) -> bool:
        """Return whether a row's states and saved activations exceed a GPU on the first pipeline stage.

        Cheaper than a plan of the memory, and never more than it. Rows that take as much are dropped with it.
        """
        group.examined.add(number)
        row = group.rows[number]
        parallel = replace(group.parallel, **row.trainer.by_axis)
        settings = replace(
            group.settings,
            row_tokens=row.row_tokens,
            sequence_parallel=parallel.tp > 1 and self.recipe.trainer.sequence_parallel is not False,
            recomputes_layers=row.recomputation.recompute == "full",
            recomputed=frozenset(row.recomputation.modules if row.recomputation.recompute == "selective" else ()),
        )
        layers = self.shape.num_layers
        # The first stage has the mean number of layers, rounded down.
        share = layers // parallel.pp * parallel.pp / layers
        saved = activations.stage_bytes(self.shape, parallel, 0, settings)
        if share * group.states[number] + saved + CONTEXT_BYTES <= (self.gpus.trainer - MARGIN_GIB) * _GIB:
            return False
        as_full = group.at_least_as_full(row)
        group.refused["memory: states and activations of an update exceed a GPU"] += len(as_full - group.overfull)
        group.overfull |= as_full
        return True

    def _is_overfull(
        self,
        state_bytes: Mapping[str, NDArray[np.float64]],
        engines: Sequence[EngineSizes],
        offloads: Sequence[Sequence[str]],
    ) -> NDArray[np.bool_]:
        """Return whether weights, states and a colocated engine exceed a GPU, in a reshard with the smallest cache
        [layouts, engines, offloads]. `state_bytes` has the bytes of a rank's states.
        """
        on_gpu = ["gradients", *([] if self.recipe.trainer.optimizer_offload_fraction else ["optimizer"])]
        # A reshard needs the parameters in any case.
        resident = [
            state_bytes["weights"] + sum(state_bytes[state] for state in on_gpu if state not in offloaded)
            for offloaded in offloads
        ]
        weights = self.costs.engine_item_bytes * model_work(self.shape).weights
        awake = np.array([weights / engine.tp for engine in engines])
        total = np.stack(resident, axis=1)[:, None, :] + awake[None, :, None] + CONTEXT_BYTES
        return total > (self.gpus.trainer - MARGIN_GIB) * _GIB

    def _plan_layout(
        self, group: Combinations, index: tuple[int, int, int], refused: Counter[str]
    ) -> FoundLayout | None:
        """Return the layout of a combination with its memory and its KV cache. None: it does not fit."""
        row, engine, offload = group.rows[index[0]], group.engines[index[1]], group.offloads[index[2]]
        least = self._least_cache_gib(engine)
        values = {
            **row.trainer.values,
            **row.recomputation.values,
            "trainer.max_tokens_per_microbatch": row.row_tokens,
            "trainer.max_tokens_per_forward": None,
            "trainer.keep_logits": None,
            "trainer.offload": offload,
            "rollout.tp": engine.tp,
            "rollout.vllm": vllm_with(group.placed, engine.ep),
            "rollout.gpu_memory_utilization": None,
            "rollout.kv_cache_gib": least,
        }
        recipe = with_field_values(group.placed, values)
        parallel = sizes.parallel_of(recipe)
        models, stages = self._models_on(parallel), _fullest_stages(parallel)
        table = memory_table(recipe, models, GPU, gpu_gib=self.gpus.engine, stages=stages)
        # The margin for wrong guesses holds for all phases, as it does for the default KV cache.
        limit = replace(self.gpus, trainer=self.gpus.trainer - MARGIN_GIB, engine=self.gpus.engine - MARGIN_GIB)
        if over := limit.overfull_phases(table):
            refused[f"memory: {over[0].name} exceeds a GPU"] += 1
            if any(phase.metric in ("train", "logprobs") for phase in over):
                group.overfull |= group.at_least_as_full(row)
            return None
        cache = max(least, cache_within(table, self.gpus.engine - MARGIN_GIB))
        tokens = cache * _GIB / self.costs.token_bytes(engine)
        rollout = self.costs.rollout(group.placement, engine, tokens)
        # As a start chooses it.
        keeps_logits = can_keep_logits(recipe, models, self.gpus, stages=stages)
        update = group.update if keeps_logits else group.update_without_logits
        seconds = StepSeconds(
            rollout=rollout.seconds,
            logprobs=float(group.logprobs[index[0]]),
            train=float(update.seconds[index[0]]),
            reshard=float(group.reshard[index[1]]),
            offload=float(group.offload[index[0], index[2]]),
            other=self.costs.other_seconds,
            is_concurrent=group.placement.staleness > 0,
        )
        more = (cache - least) * _GIB
        gib = {
            phase.name: (phase.device_bytes + (more if phase.use("KV cache").device_bytes else 0)) / _GIB
            for phase in table.phases
        }
        values |= placement_values(self.recipe, group.placement) | {"rollout.kv_cache_gib": round(cache, 1)}
        overrides = overrides_between(self.recipe, values)
        if self.file is not None and (fault := self.file.refusal(overrides)) is not None:
            refused[reason_of(fault)] += 1
            return None
        return FoundLayout(
            overrides=overrides,
            trainer=row.trainer,
            engine=engine,
            placement=group.placement,
            seconds=seconds,
            rollout=rollout,
            update=update.at(index[0]),
            gib=gib,
            kv_cache_gib=cache,
        )

    def _models_on(self, parallel: ParallelConfig) -> Models:
        """Return the run's models with these parallel sizes. Teachers keep their own."""

        def with_parallel(built: Built | None) -> Built | None:
            return None if built is None else Built(built.shape, parallel)

        policy = with_parallel(self.models.policy)
        assert policy is not None
        frozen = {
            name: built if name in self.recipe.teachers else Built(built.shape, parallel)
            for name, built in self.models.frozen.items()
        }
        return Models(policy, with_parallel(self.models.critic), frozen)

    def _least_cache_gib(self, engine: EngineSizes) -> float:
        """Return the GiB of the smallest KV cache that holds a longest sequence, rounded up."""
        # Two blocks more: one reserved by vLLM, one partly filled.
        needed = (self.recipe.context_tokens + 32) * self.costs.token_bytes(engine)
        return math.ceil(needed / _GIB * 100) / 100


def _fullest_stages(parallel: ParallelConfig) -> list[int]:
    """Return the pipeline stages of which one needs most memory: the first, the second, and the last.

    Later stages have fewer rows in flight than the second, and not more layers.
    """
    return sorted({0, min(1, parallel.pp - 1), parallel.pp - 1})


def search_of(
    recipe: Recipe, lengths: Lengths, max_staleness: int | None = None, file: RecipeFile | None = None
) -> LayoutSearch:
    """Return the search of a recipe's layouts. `max_staleness` is the limit for separate engines; None: the recipe's.

    With the recipe's file, found overrides are checked by the rules of a start.

    Raises ConfigError if the cost model does not cover the recipe, or its kind of GPU is unknown.
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
    return LayoutSearch(costs=costs, gpus=gpus, file=file)
