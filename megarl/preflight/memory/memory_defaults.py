"""Defaults that the memory of the GPUs decides: offloading, recomputation, KV cache, rows without gradients, logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from megarl.config import Recipe
from megarl.config.effects import unmet
from megarl.config.library_settings import reserved_settings
from megarl.config.override_text import short_override
from megarl.config.parallel import ParallelConfig
from megarl.config.schema import value_at
from megarl.families.logprob_chunks import logprob_chunk_tokens
from megarl.memory_plan.devices import GPU, MARGIN_GIB, GpuMemory
from megarl.memory_plan.kept_logits import FIELD as KEEP_LOGITS
from megarl.memory_plan.kept_logits import can_keep_logits
from megarl.memory_plan.memory_table import Phase
from megarl.memory_plan.models import Built, Models
from megarl.memory_plan.phases import memory_table
from megarl.memory_plan.remedies import forward_row_tokens, with_field_values
from megarl.memory_plan.savings import offloads, recomputations
from megarl.preflight import sizes
from megarl.preflight.memory.memory_fit import gpu_memory, models_of, ranks_on_cpu
from megarl.preflight.model import model_sizes
from megarl.preflight.vllm_limits import default_cache_gib, is_cache_given
from megarl.step_cost.lengths import assumed_lengths
from megarl.types import DataError

_GIB = 2**30
_CACHE = "rollout.kv_cache_gib"
_OFFLOAD, _RECOMPUTE = "trainer.offload", "trainer.recompute"
_ROWS = "trainer.max_tokens_per_forward"
_CHUNK = "trainer.logprob_chunk_tokens"


def with_memory_defaults(recipe: Recipe, *, is_start: bool = False, is_trained: bool = True) -> Recipe:
    """Return the recipe with the fields that it leaves out and the memory of its GPUs decides.

    They are the offloaded states, the recomputed activations, the KV cache, the row length of passes without gradients,
    and whether updates keep their logits. A later check tests whether all fits. The recipe is returned unchanged if its
    memory cannot be predicted, or if it starts (`is_start`) on a CPU. `is_trained` False: only engines start, on all
    ranks.
    """
    wants_cache = recipe.has_engine and not is_cache_given(recipe)
    wants_rows = is_trained and recipe.trainer.max_tokens_per_forward is None
    wants_savings = is_trained and not (_sets_field(recipe, _OFFLOAD) and _sets_field(recipe, _RECOMPUTE))
    wants_logits = is_trained and recipe.trainer.keep_logits is None
    if not (wants_cache or wants_rows or wants_savings or wants_logits) or (is_start and ranks_on_cpu(recipe)):
        return recipe
    if (planned := _planned_models(recipe)) is None:
        return recipe
    models, gpus = planned
    # An evaluation loads no trainer, so the cache may take the memory that training would use.
    if not is_trained:
        models = Models(_engines_alone(models.policy), None, {})
    if wants_savings:
        recipe = with_field_values(recipe, _Savings(recipe, models, gpus).choose_values())
    if wants_cache:
        recipe = with_field_values(recipe, {_CACHE: default_cache_gib(recipe, models, gpus)})
    if wants_logits and can_keep_logits(recipe, models, gpus):
        recipe = with_field_values(recipe, {KEEP_LOGITS: True})
    # Last: these rows may take the memory of an update.
    if wants_rows and (row_tokens := forward_row_tokens(recipe, models, gpus)) is not None:
        recipe = with_field_values(recipe, {_ROWS: row_tokens})
    return recipe


def _planned_models(recipe: Recipe) -> tuple[Models, GpuMemory] | None:
    """Return the models of a recipe and the memory of its GPUs. None: its memory cannot be predicted."""
    if (gpus := gpu_memory(recipe)) is None or any(sizes.ranks(recipe)):
        return None
    try:
        models = models_of(recipe, sizes.parallel_of(recipe))
    except DataError:
        return None  # The checks of the model folder report it.
    return None if any(model_sizes.model_fit(recipe, models.policy.shape)) else (models, gpus)


def _sets_field(recipe: Recipe, field: str) -> bool:
    """Return whether the recipe sets the offloaded states, or the recomputed activations."""
    trainer = recipe.trainer
    if field == _RECOMPUTE and not reserved_settings("recompute").keys().isdisjoint(trainer.megatron):
        return True
    return field.partition(".")[2] in trainer.model_fields_set


def with_chunk_tokens(recipe: Recipe) -> Recipe:
    """Return the recipe with the chunk of tokens for log-probs that ranks choose, the least of policy and teachers.

    It is for printing: a run leaves the field out, so that each model chooses for its own sizes. The recipe is returned
    unchanged if it sets the field or has no log-probs, or if its models cannot be read.
    """
    if recipe.trainer.logprob_chunk_tokens is not None or unmet(recipe, _CHUNK) is not None or any(sizes.ranks(recipe)):
        return recipe
    try:
        models = models_of(recipe, sizes.parallel_of(recipe))
    except DataError:
        return recipe  # The checks of the model folder report it.
    is_gpu = gpu_memory(recipe) is not None or not ranks_on_cpu(recipe)
    scored = [models.policy, *(built for name, built in models.frozen.items() if name in recipe.teachers)]
    chunk_tokens = min(logprob_chunk_tokens(recipe, built.shape, built.parallel, is_gpu=is_gpu) for built in scored)
    return with_field_values(recipe, {_CHUNK: chunk_tokens})


def memory_defaults(written: Recipe, completed: Recipe) -> Iterator[str]:
    """Yield a line with the reason for each field that `with_memory_defaults` or `with_chunk_tokens` added to the
    recipe `written`.
    """
    fields = [
        field for field in (_OFFLOAD, _RECOMPUTE) if _sets_field(completed, field) and not _sets_field(written, field)
    ]
    if fields and (planned := _planned_models(completed)) is not None:
        savings = _Savings(written, *planned)
        for field in fields:
            # Ranks that never alternate between models have nothing to offload.
            if field == _OFFLOAD and offloads(completed) == [()]:
                continue
            yield f"{_format_field(completed, field)} by default: {savings.explain(field, completed)}"
    cache, rows = completed.rollout.kv_cache_gib, completed.trainer.max_tokens_per_forward
    if cache != written.rollout.kv_cache_gib:
        yield f"{_CACHE} = {cache:g} by default: the rest of a GPU's memory"
    if rows != written.trainer.max_tokens_per_forward:
        yield f"{_ROWS} = {rows} by default: the longest rows within an update's memory"
    if completed.trainer.keep_logits != written.trainer.keep_logits:
        yield f"{KEEP_LOGITS} = true by default: an update leaves {MARGIN_GIB:g} GiB of a GPU"
    chunk = completed.trainer.logprob_chunk_tokens
    if chunk != written.trainer.logprob_chunk_tokens:
        yield f"{_CHUNK} = {chunk} by default: by time and memory, at most 1 GiB of logits"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prediction:
    """Memory predicted for a recipe with one choice of offloading and recomputation."""

    fullest: Phase
    """The phase that leaves least of its GPU."""
    free_gib: float
    """GiB that this phase leaves."""
    requests: int
    """Concurrent requests that the KV cache holds at their expected length, at most those of a step."""
    wanted_requests: int
    """Concurrent requests of a step. 0: the recipe sets the size of the KV cache, so it is no reason for a choice."""

    @property
    def is_enough(self) -> bool:
        return self.free_gib >= MARGIN_GIB and self.requests >= self.wanted_requests

    @property
    def sort_key(self) -> tuple[float, int]:
        """Return the key by which the better one of two choices is larger: free memory up to the margin, then the KV
        cache.
        """
        return min(self.free_gib, MARGIN_GIB), self.requests


@dataclass(frozen=True)
class _Savings:
    """Chooses the least offloading and recomputation of a recipe that leave 8 GiB of each GPU.

    A KV cache that the recipe leaves out must also hold all concurrent requests of a step. If no choice is enough, the
    one with the most free memory counts, then the one with the largest cache.
    """

    recipe: Recipe
    models: Models
    gpus: GpuMemory

    def choose_values(self) -> dict[str, Any]:
        """Return values for the fields that the recipe leaves out, by field."""
        best: tuple[_Prediction, dict[str, Any]] | None = None
        # Offloading costs seconds of a step, recomputation a share of the training time: so it is tried last.
        for recomputed, offloaded in product(self._list_choices(_RECOMPUTE), self._list_choices(_OFFLOAD)):
            values = {**offloaded, **recomputed}
            prediction = self._predict(with_field_values(self.recipe, values))
            if prediction.is_enough:
                return values
            if best is None or prediction.sort_key > best[0].sort_key:
                best = prediction, values
        assert best is not None
        return best[1]

    def explain(self, field: str, completed: Recipe) -> str:
        """Return why a field of the completed recipe has its value: what the next cheaper one would leave."""
        choices = self._list_choices(field)
        place = next(
            place
            for place, values in enumerate(choices)
            if all(value_at(completed, name) == value for name, value in values.items())
        )
        if place == 0:
            fullest = self._find_fullest(field, completed)
            return f"{fullest.name} {_format_left(self._free_gib(fullest), 'leaves', 'takes')}"
        cheaper = with_field_values(completed, choices[place - 1])
        prediction, present = self._predict(cheaper), self._predict(completed)
        with_cheaper = f"with {_format_field(cheaper, field)}"
        if prediction.sort_key[0] < present.sort_key[0]:
            gpu_text = _format_left(prediction.free_gib, "would leave", "would take")
            return f"{with_cheaper} {prediction.fullest.name} {gpu_text}"
        return (
            f"{with_cheaper} the KV cache would hold {prediction.requests} of {prediction.wanted_requests} concurrent "
            f"requests of {self._request_tokens:,.0f} tokens"
        )

    def _find_fullest(self, field: str, recipe: Recipe) -> Phase:
        """Return the fullest phase that a field changes: of updates, or for offloading of all others."""
        table = memory_table(recipe, self.models, GPU, gpu_gib=self.gpus.engine)
        phases = [phase for phase in table.phases if (phase.metric == "train") == (field == _RECOMPUTE)]
        return min(phases, key=self._free_gib)

    def _free_gib(self, phase: Phase) -> float:
        return self.gpus.gib_for(phase) - phase.device_bytes / _GIB

    def _list_choices(self, field: str) -> list[dict[str, Any]]:
        """Return the values that a field may get, cheapest first, with those of the fields that depend on it."""
        if _sets_field(self.recipe, field):
            return [{}]
        if field == _OFFLOAD:
            return [{_OFFLOAD: states} for states in offloads(self.recipe)]
        choices = [choice.values for choice in recomputations(self.recipe, self.models.policy.shape)]
        return [values for values in choices if self._can_recompute(values)]

    def _can_recompute(self, values: Mapping[str, Any]) -> bool:
        """Return whether this machine's libraries can recompute the modules that these values choose."""
        # The check yields refusals. A later check of the whole recipe would refuse these values as well.
        refusals = model_sizes.recomputed_modules_fit(with_field_values(self.recipe, values), self.models.policy.shape)
        return next(iter(refusals), None) is None

    def _predict(self, recipe: Recipe) -> _Prediction:
        is_cache_chosen = recipe.has_engine and not is_cache_given(self.recipe)
        if is_cache_chosen:
            recipe = with_field_values(recipe, {_CACHE: default_cache_gib(recipe, self.models, self.gpus)})
        table = memory_table(recipe, self.models, GPU, gpu_gib=self.gpus.engine)
        fullest = min(table.phases, key=self._free_gib)
        requests = wanted_requests = 0
        if is_cache_chosen and table.cache is not None:
            wanted_requests = table.cache.under_way
            requests = min(wanted_requests, int(table.cache.tokens / self._request_tokens))
        return _Prediction(
            fullest=fullest, free_gib=self._free_gib(fullest), requests=requests, wanted_requests=wanted_requests
        )

    @cached_property
    def _request_tokens(self) -> float:
        """Return the expected tokens of a request while it is decoded, by the lengths that `--search` assumes."""
        lengths = [
            assumed_lengths(
                limit=source.recipe.rollout.sampling.max_new_tokens,
                max_prompt_tokens=source.recipe.data.max_prompt_tokens,
            )
            for source in self.recipe.sources
        ]
        return max(length.prompt_tokens + length.mean_age for length in lengths)


def _format_left(free_gib: float, leaves: str, takes: str) -> str:
    """Return in words how much of a GPU a phase leaves, or takes in excess. `leaves` and `takes` are the verbs."""
    if free_gib < 0:
        return f"{takes} {-free_gib:.1f} GiB more than a GPU has"
    return f"{leaves} {free_gib:.1f} GiB of a GPU"


def _format_field(recipe: Recipe, field: str) -> str:
    """Return a field with its value for a message, and with the modules of a selective recomputation."""
    name, _, value = short_override(field, value_at(recipe, field)).partition("=")
    is_selective = field == _RECOMPUTE and value == "selective"
    return f"{name} = {value}" + f" ({', '.join(recipe.trainer.recompute_modules)})" * is_selective


def _engines_alone(policy: Built) -> Built:
    """Return a recipe in which engines own all ranks, as in `megarl eval`."""
    parallel = policy.parallel
    engines = ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=parallel.rollout_tp, rollout_ep=parallel.rollout_ep)
    return Built(policy.shape, replace(engines, rollout_ranks=parallel.num_ranks))
