"""The canary (weights.canary_every): a fixed batch that every replica computes twice. Sound ranks give equal bits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megarl.cluster.run_ranks import RunRanks
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.loops.observers.step_observer import StepObserver
from megarl.loops.step import Step
from megarl.tracking.metric_rows import SLOWEST_RANK, MetricRow
from megarl.tracking.model_outputs import CanaryReport, Place
from megarl.tracking.run_folder import RunFolder
from megarl.types import FaultyNodeError

METRICS = (
    MetricRow(
        "time/canary_seconds",
        "seconds",
        "both passes of the canary's batch, in steps that compute it",
        SLOWEST_RANK,
        condition="weights.canary_every",
    ),
)


class Verdict(NamedTuple):
    """Ranks with wrong results of the canary.

    `output` is the name of the first different output. `is_unstable`: a rank's two results differ; otherwise replicas
    differ. `is_decided`: the wrong rank is certainly among `ranks`.
    """

    ranks: tuple[int, ...]
    output: str
    is_unstable: bool
    is_decided: bool


class _ReplicaDifference(NamedTuple):
    """First output of the canary that differs between ranks with the same part of the model.

    `place` orders outputs by computation. `ranks` are the wrong ones if a majority agrees, else all of them.
    """

    place: Place
    output: str
    ranks: tuple[int, ...]
    is_majority: bool


class Canary(StepObserver):
    """Computes the canary before the updates of every n-th step. A wrong result ends the run and excludes the node."""

    def __init__(self, recipe: Recipe, parallel: ParallelConfig, ranks: RunRanks, folder: RunFolder) -> None:
        self._every_steps, self._parallel, self._ranks, self._folder = (
            recipe.weights.canary_every,
            parallel,
            ranks,
            folder,
        )
        self._last_step = folder.resumed_step
        """Newest step with a right canary; at first, the step of the resumed checkpoint."""

    async def before_updates(self, step: Step) -> None:
        """Compute the canary if due, and add its metric. Raises FaultyNodeError for a difference."""
        if not self._every_steps or step.number % self._every_steps:
            return
        reports: list[CanaryReport] = await self._ranks.trainers.call("weight_checks.compute_canary")
        verdict = judge(reports, self._parallel)
        if verdict is not None:
            raise self._error(verdict, step.number)
        self._last_step = step.number
        step.log({"time/canary_seconds": max(report.seconds for report in reports)})

    def _error(self, verdict: Verdict, step: int) -> FaultyNodeError:
        nodes = [self._ranks.topology[rank][0] for rank in verdict.ranks]
        places = ", ".join(f"rank {rank} on {node}" for rank, node in zip(verdict.ranks, nodes, strict=True))
        one_of = "one of " if len(verdict.ranks) > 1 else ""
        how = "computed two different results" if verdict.is_unstable else "computed another result than its replicas"
        # If all wrong ranks are on one node, this node is at fault, whichever rank it is.
        excluded = tuple(dict.fromkeys(nodes)) if len(set(nodes)) == 1 else ()
        remedy = f"Node {excluded[0]} is excluded from now on" if excluded else self._undecided_remedy(verdict)
        return FaultyNodeError(
            f"weights.canary_every = {self._every_steps}: before the updates of step {step}, {one_of}trainer {places} "
            f"{how} of the canary batch with the same weights, first at {verdict.output}. The GPU or the memory is "
            f"probably faulty. {remedy}. The canary was right at step {self._last_step}: remove checkpoints after it "
            f"if in doubt. Go on with: megarl train {self._folder.path} --resume",
            rank=verdict.ranks[0] if len(verdict.ranks) == 1 else None,
            nodes=excluded,
        )

    @staticmethod
    def _undecided_remedy(verdict: Verdict) -> str:
        if verdict.is_decided:
            return "No node is excluded, because the ranks that share this output are on several nodes"
        return "No node is excluded: both repeat their own result, and two replicas have no majority"


def judge(reports: Sequence[CanaryReport], parallel: ParallelConfig) -> Verdict | None:
    """Return the ranks with wrong results among the reports of all trainer ranks, or None.

    A rank that does not repeat its own result is wrong. Otherwise ranks with the same part of the model compare their
    results, and the majority of replicas is right. Only the first different output counts, because later ones follow
    from it. With expert parallelism replicas compute each other's experts, so only the repetition is compared.
    """
    unstable = {
        rank: first_difference
        for rank, report in enumerate(reports)
        if (first_difference := _first_repeated(report)) is not None
    }
    if unstable:
        first = min(unstable.values())
        ranks = tuple(rank for rank, (place, _) in unstable.items() if place == first[0])
        return Verdict(ranks, first[1], is_unstable=True, is_decided=True)
    if parallel.ep > 1:
        return None
    differences = [
        difference for group in _replicas(parallel) if (difference := _find_difference(reports, group)) is not None
    ]
    if not differences:
        return None
    earliest = min(differences, key=lambda difference: (difference.place, difference.output))
    first_ones = [difference for difference in differences if difference.place == earliest.place]
    ranks = tuple(sorted({rank for difference in first_ones for rank in difference.ranks}))
    is_decided = all(difference.is_majority for difference in first_ones)
    return Verdict(ranks, earliest.output, is_unstable=False, is_decided=is_decided)


def _first_repeated(report: CanaryReport) -> tuple[Place, str] | None:
    """Return place and name of the first output that a rank's second pass computed differently, or None."""
    for output, repeated_number in zip(report.outputs, report.repeated, strict=True):
        if output.number != repeated_number:
            return output.place, output.name
    return None


def _replicas(parallel: ParallelConfig) -> Iterator[list[int]]:
    """Yield groups of ranks with the same part of the model, one rank of each data-parallel replica."""
    groups: Mapping[tuple[int, int, int], list[int]] = defaultdict(list)
    for rank in range(parallel.world_size):
        coordinates = parallel.coordinates(rank)
        groups[coordinates.tp, coordinates.pp, coordinates.cp].append(rank)
    yield from groups.values()


def _find_difference(reports: Sequence[CanaryReport], group: Sequence[int]) -> _ReplicaDifference | None:
    for outputs in zip(*(reports[rank].outputs for rank in group), strict=True):
        counts = Counter(output.number for output in outputs)
        if len(counts) == 1:
            continue
        [(number, num_equal)] = counts.most_common(1)
        is_majority = 2 * num_equal > len(group)
        minority_ranks = [rank for rank, output in zip(group, outputs, strict=True) if output.number != number]
        ranks = tuple(minority_ranks if is_majority else group)
        return _ReplicaDifference(outputs[0].place, outputs[0].name, ranks, is_majority)
    return None
