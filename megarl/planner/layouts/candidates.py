"""Lists the layouts of trainer and engines that a recipe's checks accept, and counts the refused layouts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

from megarl.config import Recipe
from megarl.families.shape import ModelShape
from megarl.planner import model_sizes, sizes
from megarl.planner.search import with_field_values
from megarl.planner.sizes import WHOLE_EXPERTS, divisors, has_whole_experts
from megarl.rounding import divide_up, round_up

_MOST_CP = 16
"""Largest context-parallel size to try. With more ranks, each chunk is too short for attention kernels."""
_VPP = (1, 2, 4)
"""Numbers of model chunks per pipeline stage to try. More chunks shorten the bubble, but store more activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSizes:
    """Parallel sizes of a trainer, named like the fields of `trainer`."""

    tp: int
    pp: int
    cp: int
    vpp: int
    ep: int
    etp: int
    dp: int

    @property
    def by_axis(self) -> dict[str, int]:
        return asdict(self)

    @property
    def values(self) -> dict[str, Any]:
        """The recipe fields. The data-parallel size follows from the other sizes, so it is unset."""
        return {f"trainer.{axis}": size for axis, size in self.by_axis.items()} | {"trainer.dp": None}


class EngineSizes(NamedTuple):
    """Tensor-parallel size of each engine. `ep`: an engine rank has some whole experts, not a part of every expert."""

    tp: int
    ep: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where engines run. `ranks`: number of ranks that only sample; 0: engines share the trainer's ranks. `staleness`:
    number of steps for engines to sample ahead.
    """

    ranks: int
    staleness: int

    @property
    def values(self) -> dict[str, Any]:
        """The recipe fields of this placement."""
        if not self.ranks:
            return {"rollout.placement": "colocated", "rollout.ranks": None, "rollout.max_staleness": None}
        return {
            "rollout.placement": "separate",
            "rollout.ranks": self.ranks,
            "rollout.max_staleness": self.staleness or None,
        }


@dataclass(frozen=True)
class Candidates:
    """Lists the possible placements, engines and trainers of a recipe. `placed` is the recipe with a placement.
    `refused` counts the refused choices by reason.
    """

    recipe: Recipe
    shape: ModelShape
    refused: Counter[str]
    _expert_faults: dict[tuple[int, int, int, int], list[str]] = field(default_factory=dict)
    """The first error, if any, by (tp, cp, ep, etp)."""
    _row_multiples: dict[tuple[int, int], int] = field(default_factory=dict)
    """Number of tokens that divides each row length, by (tp, cp)."""

    def list_placements(self, staleness: int) -> Iterator[Placement]:
        """Yield the placements: colocated, and separate engines on some of the nodes (on a single node: of its ranks).

        `staleness`: steps that separate engines sample ahead.
        """
        cluster = self.recipe.cluster
        if cluster.groups.engines is not None:
            yield Placement(ranks=cluster.groups.engines.num_ranks, staleness=staleness)
            return
        yield Placement(ranks=0, staleness=0)
        num_ranks, ranks_per_node = cluster.world_size, cluster.ranks_per_node
        ranks_per_unit = ranks_per_node if cluster.nodes > 1 else 1
        engine_rank_counts = sorted(
            {num_ranks * eighths // 8 // ranks_per_unit * ranks_per_unit for eighths in range(1, 8)} - {0, num_ranks}
        )
        for ranks in engine_rank_counts:
            placement = Placement(ranks=ranks, staleness=staleness)
            # Engines of one rank fit any number of ranks, so each remaining error concerns the placement.
            values = placement.values | {"rollout.tp": 1}
            if not self._count_refusal([*sizes.find_placement_faults(with_field_values(self.recipe, values))]):
                yield placement

    def list_engines(self, placed: Recipe) -> list[EngineSizes]:
        """Return the sizes of engines that the recipe's checks accept on the ranks of this placement."""
        engine_sizes = []
        num_ranks = placed.separate_ranks or placed.cluster.world_size
        is_whole_in_recipe = has_whole_experts(placed)
        for tp, ep in product(
            divisors(num_ranks, limit=self.shape.num_heads), (is_whole_in_recipe, not is_whole_in_recipe)
        ):
            # The cost model treats whole and split experts alike. So try the other choice only if the recipe's is
            # refused, and if it makes a difference.
            if ep != is_whole_in_recipe and (
                tp == 1 or not self.shape.num_experts or EngineSizes(tp, is_whole_in_recipe) in engine_sizes
            ):
                continue
            values = {"rollout.tp": tp, "rollout.vllm": vllm_with(placed, ep)}
            candidate = with_field_values(placed, values | dict(SMALLEST))
            if not self._count_refusal(
                [*sizes.find_rank_faults(candidate), *model_sizes.find_size_faults(candidate, self.shape)]
            ):
                engine_sizes.append(EngineSizes(tp, ep))
        return engine_sizes

    def list_trainers(self, placed: Recipe) -> list[TrainerSizes]:
        """Return the sizes of a trainer that the recipe's checks accept on this placement's ranks.

        First the sizes of dense layers are checked, then each way to split the experts.
        """
        trainer_sizes = []
        num_ranks, ranks_per_node = placed.trainer_ranks, placed.cluster.ranks_per_node
        # Engines of one rank fit any number of ranks, so each error concerns the trainer.
        with_small_engines = with_field_values(placed, {"rollout.tp": 1} if not placed.separate_ranks else {})
        dense_combinations = product(
            divisors(num_ranks, limit=min(ranks_per_node, self.shape.num_heads)),
            divisors(num_ranks, limit=self.shape.num_layers),
            divisors(num_ranks, limit=_MOST_CP),
            _VPP,
        )
        expert_combinations = [(1, 1)]
        if self.shape.num_experts:
            expert_splits = divisors(self.shape.moe_intermediate_size, limit=ranks_per_node)
            expert_combinations = [*product(divisors(self.shape.num_experts), expert_splits)]
        for tp, pp, cp, vpp in dense_combinations:
            if num_ranks % (tp * pp * cp):
                reason = "trainer.tp * trainer.pp * trainer.cp does not divide the ranks"
                self.refused[reason] += len(expert_combinations)
                continue
            dense_sizes = TrainerSizes(tp=tp, pp=pp, cp=cp, vpp=vpp, ep=1, etp=1, dp=num_ranks // (tp * pp * cp))
            candidate = with_field_values(with_small_engines, dense_sizes.values)
            rules = (sizes.find_rank_faults, _find_batch_faults, sizes.find_length_faults)
            if self._count_refusal([fault for rule in rules for fault in rule(candidate)], len(expert_combinations)):
                continue
            if self._count_refusal([*self._find_model_faults(candidate)], len(expert_combinations)):
                continue
            trainer_sizes += self._split_experts(with_small_engines, dense_sizes, expert_combinations)
        return trainer_sizes

    def _split_experts(
        self, placed: Recipe, dense_sizes: TrainerSizes, expert_combinations: Sequence[tuple[int, int]]
    ) -> Iterator[TrainerSizes]:
        """Yield the sizes with each accepted pair (ep, etp). `placed` has engines of one rank."""
        num_ranks = placed.trainer_ranks
        for ep, etp in expert_combinations:
            if ep * etp == 1:
                yield dense_sizes
                continue
            if num_ranks % (ep * etp * dense_sizes.pp):
                self.refused["trainer.ep * trainer.etp * trainer.pp does not divide the ranks"] += 1
                continue
            expert_sizes = replace(dense_sizes, ep=ep, etp=etp)
            # Errors of experts do not depend on pp and vpp, which the caller has checked.
            expert_key = (dense_sizes.tp, dense_sizes.cp, ep, etp)
            if expert_key not in self._expert_faults:
                faults = self._find_model_faults(with_field_values(placed, expert_sizes.values))
                self._expert_faults[expert_key] = [*faults][:1]
            if not self._count_refusal(self._expert_faults[expert_key]):
                yield expert_sizes

    def list_row_lengths(self, placed: Recipe, trainer: TrainerSizes) -> list[int]:
        """Return the row lengths to try, in tokens: one to four times the longest sequence."""
        multiple = self._row_multiples.get((trainer.tp, trainer.cp))
        if multiple is None:
            multiple = sizes.row_multiple(with_field_values(placed, trainer.values))
            self._row_multiples[trainer.tp, trainer.cp] = multiple
        longest_sample = max(placed.trained_tokens + bool(placed.reward.model), placed.teacher_tokens)
        return [round_up(divide_up(longest_sample * quarters, by=4), multiple=multiple) for quarters in (4, 6, 8, 16)]

    def _find_model_faults(self, candidate: Recipe) -> Iterator[str]:
        yield from model_sizes.find_size_faults(candidate, self.shape, is_sampled=False)
        yield from model_sizes.find_linear_attention_faults(candidate, self.shape)
        yield from model_sizes.find_fp8_faults(candidate, self.shape)

    def _count_refusal(self, faults: list[str], times: int = 1) -> bool:
        """Return whether there are errors. Add `times` to the count of the first error's reason."""
        if faults:
            self.refused[reason_of(faults[0])] += times
        return bool(faults)


SMALLEST: Mapping[str, Any] = {f"trainer.{axis}": 1 for axis in ("tp", "pp", "cp", "vpp", "ep", "etp")} | {
    "trainer.dp": None
}
"""Parallel sizes of the trainer that fit everywhere, for checks of the engines' sizes."""


def _find_batch_faults(recipe: Recipe) -> Iterator[str]:
    return sizes.find_batch_faults(recipe, sizes.parallel_of(recipe).dp)


def vllm_with(recipe: Recipe, ep: bool) -> dict[str, Any]:
    """Return `rollout.vllm` with whole experts on each engine rank (`ep`), or with split experts."""
    if has_whole_experts(recipe) == ep:
        return dict(recipe.rollout.vllm)
    settings = {name: value for name, value in recipe.rollout.vllm.items() if name != WHOLE_EXPERTS}
    return settings | ({WHOLE_EXPERTS: True} if ep else {})


def reason_of(fault: str) -> str:
    """Return an error without its remedy, and with N for each number, so that equal reasons count together."""
    return re.sub(r"\d+(?:[,.]\d+)*", "N", fault.partition(";")[0])
