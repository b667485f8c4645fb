"""Recipe fields whose defaults depend on GPU memory: offload, recomputation, KV cache, row length, logits, recovery."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megarl.config import Recipe
from megarl.config.effects import unmet
from megarl.config.libraries.library_settings import reserved_settings
from megarl.config.parallel import ParallelConfig
from megarl.config.reading.override_text import short_override
from megarl.config.schema import value_at
from megarl.families.logprob_chunks import logprob_chunk_tokens
from megarl.planner import model_sizes, sizes
from megarl.planner.adapter_sync import explain_sync, with_chosen_sync
from megarl.planner.cache import default_cache_gib, sets_cache_size
from megarl.planner.gpus_of_run import gpu_memory, ranks_on_cpu
from megarl.planner.judge import MemoryJudge
from megarl.planner.memory.devices import MARGIN_GIB
from megarl.planner.memory.memory_table import Phase
from megarl.planner.memory.models import Models, PlannedModel
from megarl.planner.predictions import models_of, planned_models
from megarl.planner.recovery import can_choose_recovery, recovery_defaults, with_recovery
from megarl.planner.rows import forward_row_tokens
from megarl.planner.savings import offloads, recomputations
from megarl.planner.search import Change, Choice, Move, list_choices, search, with_field_values
from megarl.planner.seconds.lengths import assumed_lengths
from megarl.types import DataError

_CACHE = "rollout.kv_cache_gib"
_OFFLOAD, _RECOMPUTE = "trainer.offload", "trainer.recompute"
_ROWS = "trainer.max_tokens_per_forward"
_CHUNK = "trainer.logprob_chunk_tokens"
KEEP_LOGITS = "trainer.keep_logits"


def with_memory_defaults(recipe: Recipe, *, is_start: bool = False, is_trained: bool = True) -> Recipe:
    """Return the recipe with values for missing fields whose defaults depend on memory.

    The fields: offloaded states, recomputation, KV cache, row length without gradients, kept logits, copies for
    recovery, and `lora.sync: auto`. Only `lora.sync` is set if memory cannot be predicted, or if the recipe starts
    (`is_start`) on a CPU. `is_trained` False: only engines start, on all ranks.
    """
    recipe = with_chosen_sync(recipe, is_trained=is_trained)
    trainer = recipe.trainer
    needs_cache = recipe.has_engine and not sets_cache_size(recipe)
    needs_rows = is_trained and trainer.max_tokens_per_forward is None
    needs_savings = is_trained and not (_sets_field(recipe, _OFFLOAD) and _sets_field(recipe, _RECOMPUTE))
    needs_logits = is_trained and trainer.keep_logits is None
    needs_recovery = is_trained and can_choose_recovery(recipe)
    needs_any = needs_cache or needs_rows or needs_savings or needs_logits or needs_recovery
    if not needs_any or (is_start and ranks_on_cpu(recipe)):
        return recipe
    if (judge := _make_judge(recipe)) is None:
        return recipe
    # An evaluation loads no trainer, so the cache may take the trainer's memory.
    if not is_trained:
        judge = MemoryJudge(Models(_engines_alone(judge.models.policy), None, {}), judge.gpus)
    if needs_savings:
        recipe = _Savings(recipe, judge).choose_values()
    if needs_cache:
        recipe = with_field_values(recipe, {_CACHE: default_cache_gib(recipe, judge)})
    if needs_logits and can_keep_logits(with_logits := with_field_values(recipe, {KEEP_LOGITS: True}), judge):
        recipe = with_logits
    # Chosen last, because these rows may take as much memory as an update.
    if needs_rows and (row_tokens := forward_row_tokens(recipe, judge)) is not None:
        recipe = with_field_values(recipe, {_ROWS: row_tokens})
    # Chosen after offloading, because offloaded states take host memory too.
    return with_recovery(recipe, judge) if needs_recovery else recipe


def can_keep_logits(recipe: Recipe, judge: MemoryJudge) -> bool:
    """Return whether an update with `trainer.keep_logits` leaves at least `MARGIN_GIB` free on each GPU."""
    if unmet(recipe, KEEP_LOGITS) is not None:
        return False
    return not any(
        phase.metric == "train" for phase in judge.overfull_phases(judge.predict(recipe), margin_gib=MARGIN_GIB)
    )


def _make_judge(recipe: Recipe) -> MemoryJudge | None:
    if (gpus := gpu_memory(recipe)) is None or (models := planned_models(recipe)) is None:
        return None
    return MemoryJudge(models, gpus)


def _sets_field(recipe: Recipe, field: str) -> bool:
    """Return whether the recipe sets `trainer.offload` or `trainer.recompute`. Megatron-Core's settings of
    recomputation count too.
    """
    trainer = recipe.trainer
    if field == _RECOMPUTE and not reserved_settings("recompute").keys().isdisjoint(trainer.megatron):
        return True
    return field.partition(".")[2] in trainer.model_fields_set


def with_chunk_tokens(recipe: Recipe) -> Recipe:
    """Return the recipe with the tokens per chunk of logits, for printing: the smallest of policy and teachers.

    Unchanged: a recipe that sets the field, computes no log-probs, or has an unreadable model.
    """
    if (
        recipe.trainer.logprob_chunk_tokens is not None
        or unmet(recipe, _CHUNK) is not None
        or any(sizes.find_rank_faults(recipe))
    ):
        return recipe
    try:
        models = models_of(recipe, sizes.parallel_of(recipe))
    except DataError:
        return recipe  # The checks of the model folder report it.
    is_gpu = gpu_memory(recipe) is not None or not ranks_on_cpu(recipe)
    scoring_models = [
        models.policy,
        *(planned_model for name, planned_model in models.frozen.items() if name in recipe.teachers),
    ]
    chunk_tokens = min(
        logprob_chunk_tokens(recipe, planned_model.shape, planned_model.parallel, is_gpu=is_gpu)
        for planned_model in scoring_models
    )
    return with_field_values(recipe, {_CHUNK: chunk_tokens})


def memory_defaults(written: Recipe, completed: Recipe) -> Iterator[str]:
    """Yield a line with the reason for each field that this module added to `written`."""
    yield from explain_sync(written, completed)
    fields = [
        field for field in (_OFFLOAD, _RECOMPUTE) if _sets_field(completed, field) and not _sets_field(written, field)
    ]
    if fields and (judge := _make_judge(completed)) is not None:
        savings = _Savings(written, judge)
        for field in fields:
            # Without models that alternate on a rank, there is nothing to offload.
            if field == _OFFLOAD and offloads(completed) == [()]:
                continue
            yield f"{_format_field(completed, field)} by default: {savings.explain_value(field, completed)}"
    cache_gib, row_tokens = completed.rollout.kv_cache_gib, completed.trainer.max_tokens_per_forward
    if cache_gib != written.rollout.kv_cache_gib:
        yield f"{_CACHE} = {cache_gib:g} by default: the rest of a GPU's memory"
    if row_tokens != written.trainer.max_tokens_per_forward:
        yield f"{_ROWS} = {row_tokens} by default: the longest rows within an update's memory"
    if completed.trainer.keep_logits != written.trainer.keep_logits:
        yield f"{KEEP_LOGITS} = true by default: an update leaves {MARGIN_GIB:g} GiB of a GPU"
    chunk_tokens = completed.trainer.logprob_chunk_tokens
    if chunk_tokens != written.trainer.logprob_chunk_tokens:
        yield f"{_CHUNK} = {chunk_tokens} by default: by time and memory, at most 1 GiB of logits"
    yield from recovery_defaults(written, completed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prediction:
    """Predicted memory of a recipe with one choice of offload and recomputation."""

    fullest: Phase
    """Phase with the least free memory on its GPU."""
    free_gib: float
    """GiB left free by `fullest` on its GPU."""
    requests: int
    """Requests of expected length that fit into the KV cache at once, at most `wanted_requests`."""
    wanted_requests: int
    """Requests of a training step decoded at once; 0: the recipe sets the size of the KV cache."""

    @property
    def is_enough(self) -> bool:
        return self.free_gib >= MARGIN_GIB and self.requests >= self.wanted_requests

    @property
    def gib_within_margin(self) -> float:
        """`free_gib`, at most the margin: more free memory makes no choice better."""
        return min(self.free_gib, MARGIN_GIB)


def _savings_score(change: Change[Choice, _Prediction]) -> tuple[Any, ...]:
    """Return a choice's sort key: sufficient choices by cost, then others by free memory and KV cache."""
    prediction = change.outcome
    if prediction.is_enough:
        return False, change.choice.cost
    return True, -prediction.gib_within_margin, -prediction.requests, change.choice.cost


@dataclass(frozen=True)
class _Savings:
    """Chooses the least offload and recomputation that leave `MARGIN_GIB` free on each GPU.

    Unless the recipe sets the size of the KV cache, the cache must also hold all requests of a step.
    """

    recipe: Recipe
    judge: MemoryJudge

    def choose_values(self) -> Recipe:
        """Return the recipe with the cheapest sufficient offload and recomputation; if none suffices, with the best."""
        # Recomputation is tried last: it costs a share of the training time, offloading only seconds per step.
        costs = {_RECOMPUTE: 10.0, _OFFLOAD: 1.0}
        moves = [
            Move(field=field, values=self._list_values(field), step=cost, condition=not _sets_field(self.recipe, field))
            for field, cost in costs.items()
        ]
        ranking = search(
            self.recipe,
            list_choices(moves, is_partial=False),
            lambda changed, _: self._predict(changed),
            _savings_score,
            bound=lambda choice: (False, choice.cost),
        )
        return ranking.changes[0].recipe

    def explain_value(self, field: str, completed: Recipe) -> str:
        """Return why the planner chose a field's value in the completed recipe.

        For the cheapest value, it names the GPU memory left. Otherwise it names what the next cheaper value would lack:
        GPU memory or KV cache.
        """
        values_by_cost = self._list_values(field)
        cost_rank = next(
            cost_rank
            for cost_rank, values in enumerate(values_by_cost)
            if all(value_at(completed, name) == value for name, value in values.items())
        )
        if cost_rank == 0:
            fullest_phase = self._find_fullest(field, completed)
            return f"{fullest_phase.name} {_format_left(self.judge.free_gib(fullest_phase), 'leaves', 'takes')}"
        cheaper = with_field_values(completed, values_by_cost[cost_rank - 1])
        cheaper_prediction, present_prediction = self._predict(cheaper), self._predict(completed)
        cheaper_text = f"with {_format_field(cheaper, field)}"
        if cheaper_prediction.gib_within_margin < present_prediction.gib_within_margin:
            gpu_text = _format_left(cheaper_prediction.free_gib, "would leave", "would take")
            return f"{cheaper_text} {cheaper_prediction.fullest.name} {gpu_text}"
        return (
            f"{cheaper_text} the KV cache would hold {cheaper_prediction.requests} of "
            f"{cheaper_prediction.wanted_requests} concurrent requests of {self._request_tokens:,.0f} tokens"
        )

    def _find_fullest(self, field: str, recipe: Recipe) -> Phase:
        """Return the fullest phase that a field affects: updates for recomputation, all others for offload."""
        table = self.judge.predict(recipe)
        phases = [phase for phase in table.phases if (phase.metric == "train") == (field == _RECOMPUTE)]
        return min(phases, key=self.judge.free_gib)

    def _list_values(self, field: str) -> list[dict[str, Any]]:
        if field == _OFFLOAD:
            return [{_OFFLOAD: states} for states in offloads(self.recipe)]
        choices = [choice.values for choice in recomputations(self.recipe, self.judge.models.policy.shape)]
        return [values for values in choices if self._can_recompute(values)]

    def _can_recompute(self, values: Mapping[str, Any]) -> bool:
        # Without this filter, a later check of the recipe would reject the default. The check yields errors.
        refusals = model_sizes.find_recompute_faults(
            with_field_values(self.recipe, values), self.judge.models.policy.shape
        )
        return next(iter(refusals), None) is None

    def _predict(self, recipe: Recipe) -> _Prediction:
        """Predict memory and concurrent requests of a recipe, with the default KV cache unless the recipe sets it."""
        is_cache_chosen = recipe.has_engine and not sets_cache_size(self.recipe)
        if is_cache_chosen:
            recipe = with_field_values(recipe, {_CACHE: default_cache_gib(recipe, self.judge)})
        table = self.judge.predict(recipe)
        fullest = min(table.phases, key=self.judge.free_gib)
        requests = wanted_requests = 0
        if is_cache_chosen and table.cache is not None:
            wanted_requests = table.cache.decoding_requests
            requests = min(wanted_requests, int(table.cache.tokens / self._request_tokens))
        return _Prediction(
            fullest=fullest, free_gib=self.judge.free_gib(fullest), requests=requests, wanted_requests=wanted_requests
        )

    @cached_property
    def _request_tokens(self) -> float:
        """The expected tokens of a request during decoding, with the lengths assumed by `--search`."""
        lengths = [
            assumed_lengths(
                limit=source.recipe.rollout.sampling.max_new_tokens,
                max_prompt_tokens=source.recipe.data.max_prompt_tokens,
            )
            for source in self.recipe.sources
        ]
        # A request in decoding has sampled `mean_age` tokens on average.
        return max(length.prompt_tokens + length.mean_age for length in lengths)


def _format_left(free_gib: float, leaves: str, takes: str) -> str:
    """Return in words the GPU memory that a phase leaves or lacks. `leaves` and `takes` are verbs."""
    if free_gib < 0:
        return f"{takes} {-free_gib:.1f} GiB more than a GPU has"
    return f"{leaves} {free_gib:.1f} GiB of a GPU"


def _format_field(recipe: Recipe, field: str) -> str:
    name, _, value = short_override(field, value_at(recipe, field)).partition("=")
    is_selective = field == _RECOMPUTE and value == "selective"
    return f"{name} = {value}" + f" ({', '.join(recipe.trainer.recompute_modules)})" * is_selective


def _engines_alone(policy: PlannedModel) -> PlannedModel:
    parallel = policy.parallel
    engines = ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=parallel.rollout_tp, rollout_ep=parallel.rollout_ep)
    return PlannedModel(policy.shape, replace(engines, rollout_ranks=parallel.num_ranks))
